//! A Linux guest with soft-RoCE (`peers/rxe`), and the Ethernet segment that it shares with this process.

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longer than any step takes on a machine that does other things too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// A running guest; killed when dropped.
pub(crate) struct Guest {
    child: Child,
    lines: Receiver<String>,
    pub(crate) log: Vec<String>,
}

impl Guest {
    /// Boots one that runs `command`. `wire` and `peer` are the UDP ports of its end of the segment and of ours.
    pub(crate) fn boot(command: &str, wire: u16, peer: u16, forward: &str) -> Self {
        let folder = std::env::var_os("DOORBELL_RXE")
            .expect("DOORBELL_RXE names the folder that peers/rxe/setup.sh made");
        let vm = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../peers/rxe/vm.sh");
        let mut child = Command::new(vm)
            .arg(folder)
            .arg(command)
            .env("LOCAL", wire.to_string())
            .env("PEER", peer.to_string())
            .env("HOSTFWD", forward)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("starting QEMU");
        let stdout = child.stdout.take().expect("piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut guest = Self {
            child,
            lines,
            log: Vec::new(),
        };
        guest.expect("CMD-START");
        guest
    }

    /// Waits for a line that contains `text`.
    pub(crate) fn expect(&mut self, text: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    let found = line.contains(text);
                    self.log.push(line);
                    if found {
                        return;
                    }
                }
                Err(_) => panic!(
                    "the guest never said {text:?}; it said:\n{}",
                    self.log.join("\n")
                ),
            }
        }
    }

    /// Everything that it has said so far.
    pub(crate) fn said(&mut self) -> &[String] {
        while let Ok(line) = self.lines.try_recv() {
            self.log.push(line);
        }
        &self.log
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Our end of the segment: a socket whose datagrams are Ethernet frames, and the port of the guest's end.
pub(crate) fn segment() -> (UdpSocket, u16, u16) {
    let ours = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let theirs = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = |s: &UdpSocket| s.local_addr().expect("bound").port();
    let (mine, wire) = (port(&ours), port(&theirs));
    drop(theirs);
    ours.connect(("127.0.0.1", wire)).expect("an address");
    ours.set_nonblocking(true).expect("supported");
    (ours, wire, mine)
}
