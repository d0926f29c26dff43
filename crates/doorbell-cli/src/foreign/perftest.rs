//! The exchange of perftest 4.5 (version string 6.06), as `ib_write_bw` and `ib_send_bw` speak it over TCP.
//!
//! Everything goes in turns: the client sends a piece, the server answers with its own of the same length.
//!
//! | step | bytes | what |
//! |---|---|---|
//! | version | 16 | decimal text, padded with zeros |
//! | system | 4 + 4 | cycle buffer and cache line, big-endian |
//! | MTU | 2 | the digit of the path MTU's code (1: 256 … 5: 4096) |
//! | keys | 108 | `lid:out_reads:qpn:psn:rkey:vaddr:` 16 bytes of GID `:srqn:`, hexadecimal; sent for each QP, and again and again as the word that a step is done |
//! | report | 5 × 8 | size, iterations (both big-endian), peak, average, message rate (big-endian doubles); after WRITEs |
//! | end | 108, 5 | the keys, then `done` from both |
//!
//! Source: perftest's perftest_communication.c, write_bw.c and send_bw.c.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell::connect::PATH_MTUS;

use super::{Foreign, Socket, hex};

/// The version that is spoken.
const VERSION: &str = "6.06";
/// The oldest that speaks alike.
const OLDEST: f64 = 5.70;
const KEYS: usize = 108;
/// What an unchecked run cycles through at the other side.
pub(crate) const CYCLE: u32 = 4096;
const CACHE_LINE: u32 = 64;

/// Which side of the exchange this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Client,
    Server,
}

/// What one side says of its queue pair and buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) qp: Foreign,
    pub(crate) out_reads: u16,
    pub(crate) rkey: u32,
    pub(crate) vaddr: u64,
}

impl Keys {
    fn emit(&self) -> [u8; KEYS] {
        let mut text = format!(
            "0000:{:04x}:{:06x}:{:06x}:{:08x}:{:016x}",
            self.out_reads, self.qp.qpn, self.qp.psn, self.rkey, self.vaddr
        );
        for byte in self.qp.gid {
            text.push_str(&format!(":{byte:02x}"));
        }
        text.push_str(":00000000:");
        let mut message = [0; KEYS];
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    fn parse(message: &[u8; KEYS]) -> Result<Self> {
        let end = message.iter().position(|&b| b == 0).unwrap_or(KEYS);
        let text = std::str::from_utf8(&message[..end]).unwrap_or("");
        let fields: Vec<&str> = text.split(':').collect();
        // Six numbers, sixteen bytes, one number, and nothing after the last colon.
        let (Some((&[lid, reads, qpn, psn, rkey, vaddr], rest)), 24) =
            (fields.split_first_chunk::<6>(), fields.len())
        else {
            bail!(
                "it sent \"{}\" as its keys: is it perftest with a GID (-x)?",
                message[..end].escape_ascii()
            );
        };
        hex(lid, 16, "LID")?;
        let mut gid = [0; 16];
        for (byte, text) in gid.iter_mut().zip(rest) {
            *byte = hex(text, 8, "GID")? as u8;
        }
        Ok(Self {
            qp: Foreign {
                qpn: hex(qpn, 24, "QPN")? as u32,
                psn: hex(psn, 24, "PSN")? as u32,
                gid,
            },
            out_reads: hex(reads, 16, "count of reads")? as u16,
            rkey: hex(rkey, 32, "rkey")? as u32,
            vaddr: hex(vaddr, 64, "address")?,
        })
    }
}

/// What a run came to, as both sides tell each other after WRITEs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Report {
    pub(crate) size: u64,
    pub(crate) iters: u64,
    /// In the units of whoever measured: perftest's are MiB/s unless its options say otherwise.
    pub(crate) peak: f64,
    pub(crate) average: f64,
    /// Millions of messages a second.
    pub(crate) rate: f64,
}

/// A conversation.
pub(crate) struct Talk {
    socket: Socket,
    role: Role,
    mine: Option<Keys>,
}

impl Talk {
    pub(crate) fn new(socket: Socket, role: Role) -> Self {
        Self {
            socket,
            role,
            mine: None,
        }
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Each side's piece, in turn.
    fn swap<const N: usize>(&mut self, mine: &[u8; N], what: &str) -> Result<[u8; N]> {
        self.swap_while(mine, what, &mut || Ok(()))
    }

    fn swap_while<const N: usize>(
        &mut self,
        mine: &[u8; N],
        what: &str,
        busy: &mut dyn FnMut() -> Result<()>,
    ) -> Result<[u8; N]> {
        if self.role == Role::Client {
            self.socket.write(mine, what)?;
        }
        let theirs = self.socket.read_while(what, busy)?;
        if self.role == Role::Server {
            self.socket.write(mine, what)?;
        }
        Ok(theirs)
    }

    /// Versions, sizes and path MTU: the smaller one, in bytes.
    pub(crate) fn open(&mut self, path_mtu: u16) -> Result<u16> {
        let mut version = [0; 16];
        for (to, from) in version.iter_mut().zip(VERSION.bytes()) {
            *to = from;
        }
        let theirs = self.swap(&version, "its version")?;
        let end = theirs.iter().position(|&b| b == 0).unwrap_or(16);
        let spoken = std::str::from_utf8(&theirs[..end])
            .ok()
            .and_then(|t| t.trim().parse::<f64>().ok())
            .with_context(|| {
                format!(
                    "{} sent \"{}\" as its version: is it perftest, started without -R?",
                    self.socket.peer(),
                    theirs.escape_ascii()
                )
            })?;
        ensure!(
            spoken >= OLDEST,
            "{} is perftest of version {spoken}; this side speaks as version {VERSION} does, which is perftest 4.5",
            self.socket.peer()
        );
        self.swap(&CYCLE.to_be_bytes(), "its cycle buffer")?;
        self.swap(&CACHE_LINE.to_be_bytes(), "its cache line size")?;
        let code = PATH_MTUS.iter().position(|&m| m == path_mtu);
        let digit = b'1' + code.context("no path MTU of InfiniBand")? as u8;
        let [theirs, _] = self.swap(&[digit, 0], "its MTU")?;
        let index = usize::from(theirs.wrapping_sub(b'1'));
        Ok(PATH_MTUS.get(index).map_or(path_mtu, |&m| m.min(path_mtu)))
    }

    /// Keys of both sides' queue pair.
    pub(crate) fn keys(&mut self, mine: Keys) -> Result<Keys> {
        self.mine = Some(mine);
        let theirs = self.swap(&mine.emit(), "its keys")?;
        Keys::parse(&theirs)
    }

    /// Both sides are at the same point; the keys serve as the word for it.
    pub(crate) fn sync(&mut self, what: &str) -> Result<()> {
        self.sync_while(what, &mut || Ok(()))
    }

    /// As [`Talk::sync`], doing something meanwhile.
    pub(crate) fn sync_while(
        &mut self,
        what: &str,
        busy: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mine = self.mine.context("keys come before a word")?;
        self.swap_while(&mine.emit(), what, busy).map(drop)
    }

    /// Waits so long for the other side's next word: a run takes its time.
    pub(crate) fn patience(&mut self, timeout: Duration) {
        self.socket.set_timeout(timeout);
    }

    /// Results of both sides.
    pub(crate) fn report(&mut self, mine: &Report) -> Result<Report> {
        const WHAT: &str = "its report";
        let mut word = |mine: u64| -> Result<u64> {
            Ok(u64::from_be_bytes(self.swap(&mine.to_be_bytes(), WHAT)?))
        };
        Ok(Report {
            size: word(mine.size)?,
            iters: word(mine.iters)?,
            peak: f64::from_bits(word(mine.peak.to_bits())?),
            average: f64::from_bits(word(mine.average.to_bits())?),
            rate: f64::from_bits(word(mine.rate.to_bits())?),
        })
    }

    /// The end.
    pub(crate) fn close(mut self) -> Result<()> {
        self.sync("its word that it is done")?;
        self.done()
    }

    /// The end, once both sides have said that they are done.
    pub(crate) fn done(mut self) -> Result<()> {
        // perftest writes this and reads nothing more.
        self.socket.write(b"done\0", "the end")
    }
}

#[cfg(test)]
mod tests {
    use super::super::Listener;
    use super::*;

    fn keys() -> Keys {
        Keys {
            qp: Foreign {
                qpn: 0x12,
                psn: 0xab_cdef,
                gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1],
            },
            out_reads: 1,
            rkey: 0x1fe_f00d,
            vaddr: 0x7f00_1234_5000,
        }
    }

    #[test]
    fn keys_are_perftests() {
        let message = keys().emit();
        let text = "0000:0001:000012:abcdef:01fef00d:00007f0012345000:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:00:01:00000000:\0";
        assert_eq!(std::str::from_utf8(&message).unwrap(), text);
        assert_eq!(Keys::parse(&message).unwrap(), keys());
        let mut wrong = message;
        wrong[12] = b'g';
        let error = Keys::parse(&wrong).unwrap_err().to_string();
        assert!(error.contains("QPN"), "{error}");
        assert!(Keys::parse(&[b'x'; KEYS]).is_err());
        assert!(Keys::parse(&[0xff; KEYS]).is_err());
    }

    #[test]
    fn both_roles_talk_to_each_other() {
        let listener = Listener::bind(0).unwrap();
        let port = listener.port().unwrap();
        let patience = Duration::from_secs(20);
        let talk = |mut talk: Talk, mtu| -> Result<(u16, Report)> {
            let mtu = talk.open(mtu)?;
            assert_eq!(talk.keys(keys())?, keys());
            talk.sync("a word")?;
            let report = talk.report(&Report {
                size: 65536,
                iters: 5000,
                peak: 1.5,
                average: 1.25,
                rate: 0.001,
            })?;
            talk.close()?;
            Ok((mtu, report))
        };
        std::thread::scope(|scope| {
            let client = scope.spawn(|| {
                let socket = Socket::dial("127.0.0.1", port, patience).unwrap();
                talk(Talk::new(socket, Role::Client), 4096).unwrap()
            });
            let socket = listener.accept(patience, None, &|| false).unwrap().unwrap();
            let (mtu, report) = talk(Talk::new(socket, Role::Server), 1024).unwrap();
            assert_eq!((mtu, report.iters, report.peak), (1024, 5000, 1.5));
            assert_eq!(client.join().unwrap().0, 1024);
        });
    }

    #[test]
    fn an_old_one_and_a_stranger_are_refused_in_words() {
        let patience = Duration::from_secs(20);
        for (bytes, part) in [
            (*b"5.33\0\0\0\0\0\0\0\0\0\0\0\0", "5.33"),
            (*b"SSH-2.0-OpenSSH_", "SSH-2.0"),
        ] {
            let listener = Listener::bind(0).unwrap();
            let port = listener.port().unwrap();
            let error = std::thread::scope(|scope| {
                let client = scope.spawn(move || {
                    let mut socket = Socket::dial("127.0.0.1", port, patience).unwrap();
                    socket.write(&bytes, "bytes").unwrap();
                    // It stays until the other side has read it.
                    let _: Result<[u8; 64]> = socket.read("what comes");
                });
                let socket = listener.accept(patience, None, &|| false).unwrap().unwrap();
                let error = Talk::new(socket, Role::Server).open(1024).unwrap_err();
                client.join().unwrap();
                error
            });
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
