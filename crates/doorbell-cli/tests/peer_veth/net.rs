//! Two network namespaces joined by a veth pair, and what runs in them.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::common::{Running, doorbell, wait_until, words};

/// The server's address, the client's, and that of somebody else on the client's side.
pub(crate) const SERVER: &str = "10.77.0.1";
pub(crate) const CLIENT: &str = "10.77.0.2";
pub(crate) const STRANGER: &str = "10.77.0.3";

static NETS: AtomicU32 = AtomicU32::new(0);

/// Side 0 is the server's, side 1 the client's. They end with this.
pub(crate) struct Net {
    sides: [String; 2],
}

fn ip(args: &[&str]) {
    let output = Command::new("ip")
        .args(args)
        .output()
        .expect("ip(8), of iproute2");
    assert!(
        output.status.success(),
        "ip {}: {}(these tests make network namespaces, as root)",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Net {
    /// Both sides up, with the MTUs given.
    pub(crate) fn new(mtus: [u32; 2]) -> Self {
        let number = NETS.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("doorbell-{}-{number}-{side}", std::process::id());
        let net = Self {
            sides: [name(0), name(1)],
        };
        let [a, b] = [&*net.sides[0], &*net.sides[1]];
        ip(&["netns", "add", a]);
        ip(&["netns", "add", b]);
        ip(&[
            "-n", a, "link", "add", "v", "type", "veth", "peer", "name", "v", "netns", b,
        ]);
        for (side, addresses) in [(0, &[SERVER][..]), (1, &[CLIENT, STRANGER][..])] {
            for address in addresses {
                net.ip(side, &["addr", "add", &format!("{address}/24"), "dev", "v"]);
            }
            net.ip(side, &["link", "set", "lo", "up"]);
            net.mtu(side, mtus[side]);
            net.ip(side, &["link", "set", "v", "up"]);
        }
        net
    }

    fn ip(&self, side: usize, args: &[&str]) {
        ip(&[&["-n", &self.sides[side]], args].concat());
    }

    pub(crate) fn mtu(&self, side: usize, mtu: u32) {
        self.ip(side, &["link", "set", "v", "mtu", &mtu.to_string()]);
    }

    /// Waits until a run is under way: packets by the thousand.
    pub(crate) fn wait_for_traffic(&self) {
        let begin = self.received();
        wait_until("traffic", || self.received() > begin + 2000);
    }

    /// Packets that reached the server's side so far.
    fn received(&self) -> u64 {
        let text = self.inside(0, || std::fs::read_to_string("/proc/thread-self/net/dev"));
        let text = text.expect("the interfaces of the namespace");
        let line = text.lines().find_map(|l| l.trim().strip_prefix("v:"));
        let packets = line.and_then(|l| l.split_whitespace().nth(1));
        packets.and_then(|n| n.parse().ok()).expect("a counter")
    }

    /// Pulls the cable, or plugs it in again.
    pub(crate) fn link(&self, up: bool) {
        self.ip(0, &["link", "set", "v", if up { "up" } else { "down" }]);
    }

    /// The command on one side; `DOORBELL_*` as given.
    pub(crate) fn start(&self, side: usize, args: &[&str], env: &[(&str, &str)]) -> Running {
        let inner = doorbell(args);
        let mut command = self.command(side, inner.get_program());
        command.args(inner.get_args());
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(env.iter().copied());
        Running::spawn(command, &format!("doorbell {}", args.join(" ")))
    }

    /// A program on one side.
    pub(crate) fn command(&self, side: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.sides[side]])
            .arg(program);
        command
    }

    /// A server that serves until it is told to end; it listens when this returns.
    pub(crate) fn serve(&self, more: &[&str], env: &[(&str, &str)]) -> Running {
        let running = self.start(0, &[&["serve"], more].concat(), env);
        running.wait_for("listening on");
        running
    }

    /// A client of that server.
    pub(crate) fn perf(&self, args: &str, env: &[(&str, &str)]) -> Running {
        let fixed = "--link roce --no-baseline --connect";
        let args = format!("perf {args} {fixed} {SERVER}");
        self.start(1, &words(&args), env)
    }

    /// Runs something in a namespace, on a thread of its own.
    pub(crate) fn inside<T: Send>(&self, side: usize, work: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.sides[side]);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                use std::os::fd::AsFd;
                let space = File::open(path).expect("the namespace");
                let kind = rustix::thread::LinkNameSpaceType::Network;
                rustix::thread::move_into_link_name_space(space.as_fd(), Some(kind))
                    .expect("entering the namespace");
                work()
            });
            thread.join().expect("the thread in the namespace")
        })
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for side in &self.sides {
            // The veth pair goes with them.
            let _ = Command::new("ip").args(["netns", "del", side]).output();
        }
    }
}
