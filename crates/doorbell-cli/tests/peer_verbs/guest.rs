//! Linux guests with soft-RoCE: booted with a script and this project's command, alone or two on one wire.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A guest boots in some eight seconds; what runs in it is a hundred times slower than here.
const PATIENCE: Duration = Duration::from_secs(280);
/// This test program, in a guest of two: runs one side of a test.
pub(crate) const SIDE: &str = "/mnt/test --ignored --nocapture --exact";

/// A guest that runs a script, and has the command as `/mnt/doorbell`, and this program as `/mnt/test`.
struct Guest {
    child: Child,
    said: mpsc::Receiver<String>,
    started: Instant,
    _share: tempfile::TempDir,
}

impl Guest {
    /// `side`: which of two on the wire of those two ports it is; the first may be alone.
    fn boot(script: &str, side: usize, ports: [u16; 2]) -> Self {
        let folder =
            std::env::var("DOORBELL_RXE").expect("DOORBELL_RXE names the folder of setup.sh");
        let share = tempfile::tempdir().expect("a folder");
        let command = share.path().join("doorbell");
        std::fs::copy(env!("CARGO_BIN_EXE_doorbell"), command).expect("a copy of the command");
        let this = std::env::current_exe().expect("this program");
        std::fs::copy(this, share.path().join("test")).expect("a copy of it");
        let file = share.path().join("script");
        std::fs::write(&file, script).expect("the script");
        let all = |path: PathBuf, mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, mode).expect("permissions");
        };
        all(file, 0o644);
        all(share.path().to_owned(), 0o755);
        let vm = concat!(env!("CARGO_MANIFEST_DIR"), "/../../peers/rxe/vm.sh");
        let mut command = Command::new(vm);
        command
            .args([folder.as_str(), "sh /mnt/script"])
            .env("SHARE", share.path())
            .env("SMP", "2")
            .env("MEM", "512")
            .env("LOCAL", ports[side].to_string())
            .env("PEER", ports[1 - side].to_string())
            .env("IP", format!("192.168.77.{}/24", side + 2))
            .env("MAC", format!("52:54:00:00:00:0{}", side + 2));
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("QEMU");
        let output = child.stdout.take().expect("piped");
        let (tell, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            said,
            started: Instant::now(),
            _share: share,
        }
    }

    /// Everything that it said, and whether it has ended.
    fn end(self) -> (String, bool) {
        let mut all = String::new();
        loop {
            let rest = PATIENCE.saturating_sub(self.started.elapsed());
            match self.said.recv_timeout(rest) {
                Ok(line) => {
                    all.push_str(&line);
                    all.push('\n');
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return (all, true),
                Err(mpsc::RecvTimeoutError::Timeout) => return (all, false),
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A wire's two ports: not of those that the system gives to whoever asks, so that they are still free when QEMU takes them.
fn wire() -> [u16; 2] {
    let free = |port: &u16| std::net::UdpSocket::bind(("127.0.0.1", *port)).is_ok();
    let mut ports = (20_000 + rand::random::<u16>() % 10_000..).filter(free);
    [(); 2].map(|()| ports.next().expect("a free port"))
}

/// Runs a script in a guest of its own; returns what was said.
pub(crate) fn guest(script: &str) -> String {
    let (said, ended) = Guest::boot(script, 0, wire()).end();
    assert!(ended, "the guest did not end:\n{said}");
    said
}

/// Runs two scripts in two guests on one wire: the first is 192.168.77.2, the second 192.168.77.3.
pub(crate) fn guests(scripts: [&str; 2]) -> [String; 2] {
    let ports = wire();
    let both = [0, 1].map(|side| Guest::boot(scripts[side], side, ports));
    let [(first, one), (second, two)] = both.map(Guest::end);
    assert!(
        one && two,
        "did the first guest end: {one}:\n{first}\nthe second: {two}:\n{second}"
    );
    [first, second]
}

/// Runs it, and expects its end with status 0.
pub(crate) fn well(script: &str) -> String {
    let said = guest(script);
    assert!(said.contains("CMD-END rc=0"), "{said}");
    said
}
