//! Ranks as processes: this test program started again, once for each process of a job.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Gather, LONG};

const SCENE: &str = "DOORBELL_TEST_SCENE";
const FOLDER: &str = "DOORBELL_TEST_FOLDER";
const RANK: &str = "DOORBELL_TEST_RANK";
const RANKS: &str = "DOORBELL_TEST_RANKS";
/// Ranks that are threads of one process.
const EACH: &str = "DOORBELL_TEST_EACH";

/// A process of the test, ended with it whatever becomes of it.
pub struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Started {
    /// Its exit status, in time.
    pub fn ends(&mut self) -> Option<i32> {
        let deadline = Instant::now() + 2 * LONG;
        loop {
            if let Some(status) = self.0.try_wait().expect("a child") {
                return status.code();
            }
            assert!(Instant::now() < deadline, "a rank does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts `ranks` ranks, `each` of them threads of one process, all of them children: this test has no rank of its own.
pub fn start(
    scene: &str,
    ranks: usize,
    each: usize,
    variables: &[(&str, &str)],
) -> (Vec<Started>, tempfile::TempDir) {
    start_by(scene, ranks, each, variables, |_| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env("DOORBELL_ROCE", "udp://127.0.0.1");
        command
    })
}

/// As [`start`], with the command that runs this program for a process of that first rank.
pub fn start_by(
    scene: &str,
    ranks: usize,
    each: usize,
    variables: &[(&str, &str)],
    program: impl Fn(usize) -> Command,
) -> (Vec<Started>, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let children = (0..ranks)
        .step_by(each)
        .map(|rank| {
            let mut command = program(rank);
            command
                .args(["--exact", "peer_process", "--ignored", "--nocapture"])
                .env(SCENE, scene)
                .env(FOLDER, folder.path())
                .env(RANK, rank.to_string())
                .env(RANKS, ranks.to_string())
                .env(EACH, each.to_string())
                .envs(variables.iter().copied())
                .stdout(Stdio::null());
            Started(command.spawn().expect("a child"))
        })
        .collect();
    (children, folder)
}

/// All of them end well.
pub fn play(scene: &str, ranks: usize, each: usize, variables: &[(&str, &str)]) {
    let (mut children, _folder) = start(scene, ranks, each, variables);
    for (n, child) in children.iter_mut().enumerate() {
        assert_eq!(child.ends(), Some(0), "process {n} of {scene}");
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).expect("started by a test of this file")
}

/// Which ranks this process is, of how many, and what they play; to be called by `peer_process`.
pub struct Part {
    pub ranks: std::ops::Range<usize>,
    pub gather: Arc<Gather>,
    pub scene: String,
}

impl Part {
    pub fn read() -> Self {
        let number = |name| variable(name).parse::<usize>().expect("a number");
        let (first, each) = (number(RANK), number(EACH));
        Self {
            ranks: first..first + each,
            gather: Gather::at(number(RANKS), PathBuf::from(variable(FOLDER)), None),
            scene: variable(SCENE),
        }
    }

    /// A work request to rank 1 is to fail in rank 0's process, and in no other. Before any thread that reads the environment.
    pub fn fail_a_request(&self) {
        if self.ranks.start == 0 {
            // The third queue pair: the companion of its own is the second.
            // SAFETY: the caller's promise.
            unsafe { std::env::set_var("DOORBELL_FAULT", "qp=#2, wqe=9: fail=REMOTE_ACCESS") };
        }
    }

    /// Every rank on a thread.
    pub fn play(&self, body: impl Fn(usize, &Arc<Gather>, &str) + Sync) {
        std::thread::scope(|scope| {
            for rank in self.ranks.clone() {
                let body = &body;
                scope.spawn(move || body(rank, &self.gather, &self.scene));
            }
        });
    }
}
