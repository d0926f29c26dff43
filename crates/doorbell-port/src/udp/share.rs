//! Several processes on one UDP port: each packet goes to the socket that its queue pair number belongs to.
//!
//! Linux lets sockets of one user share a port (`SO_REUSEPORT`) and lets a classic BPF program choose among them, without privileges. The program
//! looks at the low bits of the destination QP number, the *class*; each process takes a class of its own and makes queue pairs of that class
//! only. What the program returns is a place in the kernel's list of sockets, and places move when somebody leaves. So each member finds out
//! its own place by sending itself *probes*, which the program delivers by place, again and again; one that finds itself moved corrects the
//! table and the program. Until then packets go astray, which is loss to the transport.
//!
//! The table is a file in `/dev/shm`. Classes are claimed by record locks, which the kernel gives back when a process dies.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use crate::error::{PortError, Result};
use crate::sys::{self, Filter, filter as i};

/// Members at most: 2^bits classes.
const CLASSES: u32 = 16;
/// The low bits of a QP number.
pub(super) const MASK: u32 = CLASSES - 1;
/// First word of a probe. The opcode 0xff that it begins with is no RoCEv2 packet's.
const PROBE: u32 = 0xffdb_0001;
/// Bytes of a probe: that word, a place, a number that only the sender knows and that changes with every round.
const PROBE_LEN: usize = 16;
/// How often a member checks its place.
const ROUND: Duration = Duration::from_millis(250);
/// How long the table may be locked by others.
const PATIENCE: Duration = Duration::from_secs(2);
/// Calls between two looks at the clock.
const CALLS: u32 = 64;
/// Offset of the claims' locks in the file; offset 0 is the table's lock.
const CLAIMS: u64 = 1024;

/// Membership in a shared port.
#[derive(Debug)]
pub(super) struct Share {
    name: String,
    table: File,
    class: u32,
    place: u32,
    probe: UdpSocket,
    to: SocketAddr,
    secret: u64,
    checked: Instant,
    /// The probes under way have not told anything yet.
    waiting: bool,
    calls: u32,
}

/// Opens the table and claims a class; `None`: none is free.
fn claim(name: &str) -> io::Result<(File, Option<u32>)> {
    let end = Instant::now() + PATIENCE;
    loop {
        let table = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(name)?;
        let ours = table.metadata()?;
        // Anyone may make a file of this name before us.
        if ours.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        lock_table(&table)?;
        // The last member removes the file: perhaps just now.
        if std::fs::metadata(name).is_ok_and(|there| there.ino() == ours.ino()) {
            let class = (0..CLASSES)
                .find(|c| sys::lock_byte(table.as_fd(), CLAIMS + u64::from(*c)).unwrap_or(false));
            sys::unlock_byte(table.as_fd(), 0)?;
            return Ok((table, class));
        }
        if Instant::now() >= end {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn lock_table(table: &File) -> io::Result<()> {
    let end = Instant::now() + PATIENCE;
    while !sys::lock_byte(table.as_fd(), 0)? {
        if Instant::now() >= end {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl Drop for Share {
    fn drop(&mut self) {
        // A file that stays is found by the next member, which makes it right: nothing here must succeed.
        if lock_table(&self.table).is_ok() {
            let alone = (0..CLASSES).filter(|c| *c != self.class).all(|c| {
                sys::byte_is_locked(self.table.as_fd(), CLAIMS + u64::from(c)).is_ok_and(|l| !l)
            });
            if alone {
                let _ = std::fs::remove_file(&self.name);
            }
        }
    }
}

impl Share {
    /// Joins, with a socket that is bound already.
    pub(super) fn join(socket: &UdpSocket, local: SocketAddr) -> Result<Self> {
        let failed = |what: &str, e: io::Error| {
            PortError::system(format!("sharing UDP port {local}: {what}"), e)
        };
        let name = format!(
            "/dev/shm/doorbell-udp-{}-{}",
            rustix::process::geteuid().as_raw(),
            local.to_string().replace([':', '[', ']'], "_")
        );
        let (table, class) = claim(&name).map_err(|e| failed(&name, e))?;
        let class = class.ok_or_else(|| {
            let e = io::Error::from_raw_os_error(libc::EUSERS);
            failed(&format!("all {CLASSES} classes are taken"), e)
        })?;
        let here: IpAddr = match local.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let probe = UdpSocket::bind((here, 0)).map_err(|e| failed("a socket for probes", e))?;
        let secret =
            std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
        let mut share = Self {
            name,
            table,
            class,
            place: u32::MAX,
            probe,
            to: SocketAddr::new(here, local.port()),
            secret,
            checked: Instant::now(),
            waiting: false,
            calls: 0,
        };
        share
            .publish(socket.as_fd())
            .map_err(|e| failed("attaching the program that steers", e))?;
        share.ask();
        let end = Instant::now() + PATIENCE;
        let mut buffer = [0; PROBE_LEN];
        while share.place == u32::MAX && Instant::now() < end {
            match socket.recv_from(&mut buffer) {
                // Anything else is for whoever had our class before.
                Ok((PROBE_LEN, _)) => {
                    share.see(socket.as_fd(), &buffer);
                }
                Ok(_) => {}
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        if share.place == u32::MAX {
            let e = io::Error::from_raw_os_error(libc::ETIMEDOUT);
            return Err(failed(
                "probes to the own socket did not arrive (a firewall on loopback?)",
                e,
            ));
        }
        Ok(share)
    }

    /// The class of our queue pairs.
    pub(super) fn class(&self) -> u32 {
        self.class
    }

    /// To be called with every receive: checks the place now and then.
    #[inline]
    pub(super) fn tick(&mut self) {
        self.calls += 1;
        if self.calls >= CALLS {
            self.calls = 0;
            self.check(Instant::now());
        }
    }

    #[cold]
    fn check(&mut self, now: Instant) {
        if now.duration_since(self.checked) >= ROUND {
            self.checked = now;
            self.ask();
        }
    }

    /// Asks every place whether it is ours. Places that do not exist are given to anyone by the kernel; since they come after those that do, and
    /// loopback keeps the order, the first answer of a round is the true one.
    fn ask(&mut self) {
        self.secret = self
            .secret
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(1);
        self.waiting = true;
        let mut probe = [0; PROBE_LEN];
        probe[..4].copy_from_slice(&PROBE.to_be_bytes());
        probe[8..].copy_from_slice(&self.secret.to_ne_bytes());
        for place in 0..CLASSES {
            probe[4..8].copy_from_slice(&place.to_be_bytes());
            // A lost probe is sent again in the next round.
            let _ = self.probe.send_to(&probe, self.to);
        }
    }

    /// A datagram that may be a probe. `true`: it was one.
    pub(super) fn see(&mut self, socket: BorrowedFd<'_>, datagram: &[u8]) -> bool {
        if datagram.len() != PROBE_LEN || datagram[..4] != PROBE.to_be_bytes() {
            return false;
        }
        if self.waiting && datagram[8..] == self.secret.to_ne_bytes() {
            let place = u32::from_be_bytes([datagram[4], datagram[5], datagram[6], datagram[7]]);
            self.waiting = false;
            if place != self.place {
                self.place = place;
                if let Err(error) = self.publish(socket) {
                    // The old program goes on; the next round finds out and tries again.
                    tracing::warn!(port = %self.to, %error, "a shared UDP port cannot be steered anew");
                    self.place = u32::MAX - 1;
                }
            }
        }
        true
    }

    /// Writes our place into the table, and attaches the program that the table gives.
    fn publish(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        lock_table(&self.table)?;
        let done = self.publish_locked(socket);
        sys::unlock_byte(self.table.as_fd(), 0)?;
        done
    }

    fn publish_locked(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        // Stored plus one: a hole in the file reads as nobody.
        let stored = self.place.wrapping_add(1);
        self.table
            .write_all_at(&stored.to_ne_bytes(), u64::from(self.class) * 4)?;
        let mut program = vec![
            i(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            i(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 2, PROBE),
            i(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 4),
            i(libc::BPF_RET | libc::BPF_A, 0, 0, 0),
            // The word with the destination QP number in its lower 24 bits.
            i(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 4),
            i(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, MASK),
        ];
        for class in 0..CLASSES {
            let mut word = [0; 4];
            // A file that ends before this class: nobody ever had it.
            let there = self
                .table
                .read_exact_at(&mut word, u64::from(class) * 4)
                .is_ok();
            let place = u32::from_ne_bytes(word).wrapping_sub(1);
            let alive = class == self.class
                || sys::byte_is_locked(self.table.as_fd(), CLAIMS + u64::from(class))?;
            if there && alive && place < CLASSES {
                program.push(i(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, class));
                program.push(i(libc::BPF_RET | libc::BPF_K, 0, 0, place));
            }
        }
        // Nobody's: any socket, which drops it.
        program.push(i(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX));
        let program: Vec<Filter> = program;
        sys::attach_filter(socket, libc::SO_ATTACH_REUSEPORT_CBPF, &program)
    }
}
