//! A process that plays a scene, and what is known of it from outside.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use doorbell::report::{ProcessReport, is_stopped, missing, server};

use crate::common::LONG;
use crate::{RULE, SCENE, SOCKET};

/// A child, and what it said.
pub(crate) struct Player {
    pub(crate) child: Child,
    lines: Receiver<String>,
}

impl Player {
    pub(crate) fn start(scene: &str, rule: &str, socket: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "peer_process", "--ignored", "--nocapture"])
            .env(SCENE, scene)
            .env(RULE, rule)
            .env(SOCKET, socket)
            .env("DOORBELL_LOG", "off")
            .env(
                "DOORBELL_RECORD",
                if scene == "word" { "off" } else { "on" },
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = to.send(line);
            }
        });
        Self { child, lines }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it says of itself.
    pub(crate) fn says(&self) -> String {
        let until = Instant::now() + Duration::from_secs(60);
        let mut said = String::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.unwrap_or_else(|e| panic!("it did not come to its end: {e}: {said}"));
            if line == "READY" {
                return said;
            }
            // The test harness says something before.
            if let Some((_, line)) = line.split_once("SAYS ") {
                said.push_str(line);
                said.push('\n');
            }
        }
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    pub(crate) fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let until = Instant::now() + LONG;
        while !is_stopped(self.pid()) {
            assert!(Instant::now() < until, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        self.kill();
        for (_, path) in doorbell::report::records(self.pid()) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What is known of a process from outside, and in words.
pub(crate) fn read(pid: u32) -> (ProcessReport, String) {
    let mut reports = server::find_with_others(pid).expect("there is a report");
    missing::name(&mut reports);
    let report = reports.remove(0);
    let mut said = vec![report.post_mortem.clone().unwrap_or_default()];
    for device in &report.devices {
        assert_eq!(device.damage, None, "a record that nobody damaged");
        said.extend(device.faults.iter().cloned());
        said.extend(device.waits.iter().map(|w| w.verdict.clone()));
        said.extend(device.qps.iter().map(|q| q.verdict.clone()));
    }
    (report, said.join("\n"))
}

pub(crate) fn stuck(report: &ProcessReport) -> bool {
    report.devices.iter().any(|d| d.qps.iter().any(|q| q.stuck))
}

/// A player, and its mate.
pub(crate) fn two(dir: &std::path::Path, rule: &str, mate: &str) -> (Player, Player) {
    let socket = dir.join(format!("{}", rule.len()));
    let socket = socket.to_str().expect("UTF-8").to_owned();
    let player = Player::start("shm", rule, &socket);
    let until = Instant::now() + LONG;
    while !std::path::Path::new(&socket).exists() {
        assert!(Instant::now() < until, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    (player, Player::start(mate, "", &socket))
}
