//! Messages of a shared memory session: one `SOCK_SEQPACKET` datagram each, little-endian.
//!
//! Every message begins with [`MAGIC`], version, kind and its own length, so that any version can tell any
//! other what it is. Decoding is total: whatever bytes come in, the answer is a message or a [`Refusal`].
//! What the messages mean, and when they may come, is in `session.rs`.

use super::error::{Refusal, RefusalCode};

/// First bytes of every message and of every shared header.
pub const MAGIC: [u8; 8] = *b"DOORBELL";

/// Version of messages and shared layouts. Sides with different versions refuse each other.
pub const VERSION: u16 = 2;

/// Bytes before the body: magic, version, kind, length of the whole message.
const HEADER: usize = 16;

/// Longest message.
pub(crate) const MAX_MESSAGE: usize = 4096;

/// Longest message of the application.
pub const MAX_APP: usize = 4000;

/// Longest handle of a region in device memory (a CUDA IPC handle has 64 bytes).
pub const MAX_HANDLE: usize = 256;

/// Most descriptors with one message.
pub(crate) const MAX_FDS: usize = 3;

/// "No region" in [`Message::Revoke`].
pub(crate) const NO_REGION: u32 = u32::MAX;

/// What a side says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Names the sender's link.
    pub(crate) nonce: u64,
    /// The sender's process as it sees itself: differs from `SO_PEERCRED` across PID namespaces and forks.
    pub(crate) pid: u32,
    /// The number by which the receiver is to hold the sender's locks.
    pub(crate) holder: u32,
    /// Bytes of the key table's memfd.
    pub(crate) table_len: u64,
    /// Bytes of the mailbox's memfd.
    pub(crate) mailbox_len: u64,
    /// Bytes of the locks' memfd.
    pub(crate) words_len: u64,
}

/// What a region lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RegionKind {
    /// Host memory: a sealed memfd comes with the message.
    Host {
        /// May the peer write to it? If not, it is mapped read-only.
        writable: bool,
    },
    /// Device memory: an opaque handle that the peer's importer understands, and a descriptor if it needs one.
    Device {
        /// For example a CUDA IPC handle. At most [`MAX_HANDLE`] bytes.
        handle: Vec<u8>,
        /// Does a descriptor come with it?
        fd: bool,
        /// Its address in the owner's process: the low bits choose the locks of its words.
        addr: u64,
    },
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// First message of both sides. Descriptors: key table, mailbox, locks of words in device memory.
    Hello(Hello),
    /// Last message of a side that turns the other away.
    Refuse(Refusal),
    /// A region that keys of the sender will name. Descriptors: see [`RegionKind`].
    RegionAdd {
        /// Its number in the sender's key table.
        id: u32,
        /// Echoed in the answer.
        seq: u32,
        /// Bytes.
        len: u64,
        /// Where it lies.
        kind: RegionKind,
    },
    /// The region is mapped, or could not be.
    RegionAck {
        /// Of the [`Message::RegionAdd`].
        seq: u32,
        /// What stood against it.
        refused: Option<Refusal>,
    },
    /// All regions that existed at the handshake have been sent.
    Ready {
        /// How many they were.
        regions: u32,
    },
    /// A key was taken out of the table; stop using it, and unmap `region` unless it is [`NO_REGION`].
    Revoke {
        /// Echoed in the answer; grows by one.
        epoch: u64,
        /// The region whose last key this was.
        region: u32,
    },
    /// Every engine of the sender has passed the epoch: none uses what was revoked.
    RevokeAck {
        /// Of the [`Message::Revoke`].
        epoch: u64,
    },
    /// The sender closes and uses nothing of the other side any more: let go of what is the sender's, and answer.
    Bye,
    /// Nothing of the other side is in use any more.
    ByeAck,
    /// Bytes of the application (keys, QP numbers, barriers), at most [`MAX_APP`].
    App(Vec<u8>),
    /// The application took that many more messages: as many may be sent.
    AppTaken {
        /// How many.
        count: u32,
    },
}

impl Message {
    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => 1,
            Self::Refuse(_) => 2,
            Self::RegionAdd { .. } => 3,
            Self::RegionAck { .. } => 4,
            Self::Ready { .. } => 5,
            Self::Revoke { .. } => 6,
            Self::RevokeAck { .. } => 7,
            Self::Bye => 8,
            Self::ByeAck => 9,
            Self::App(_) => 10,
            Self::AppTaken { .. } => 11,
        }
    }

    /// How many descriptors must come with this message.
    pub(crate) fn fds(&self) -> usize {
        match self {
            Self::Hello(_) => 3,
            Self::RegionAdd {
                kind: RegionKind::Host { .. },
                ..
            } => 1,
            Self::RegionAdd {
                kind: RegionKind::Device { fd, .. },
                ..
            } => usize::from(*fd),
            _ => 0,
        }
    }

    /// The bytes of the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.kind().to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        match self {
            Self::Hello(h) => {
                out.extend_from_slice(&h.nonce.to_le_bytes());
                for v in [h.pid, h.holder] {
                    out.extend_from_slice(&v.to_le_bytes());
                }
                for v in [h.table_len, h.mailbox_len, h.words_len] {
                    out.extend_from_slice(&v.to_le_bytes());
                }
            }
            Self::Refuse(refusal) => put_refusal(&mut out, Some(refusal)),
            Self::RegionAdd { id, seq, len, kind } => {
                out.extend_from_slice(&id.to_le_bytes());
                out.extend_from_slice(&seq.to_le_bytes());
                out.extend_from_slice(&len.to_le_bytes());
                match kind {
                    RegionKind::Host { writable } => {
                        out.extend_from_slice(&[0, u8::from(*writable)])
                    }
                    RegionKind::Device { handle, fd, addr } => {
                        let handle = &handle[..handle.len().min(MAX_HANDLE)];
                        out.extend_from_slice(&[1, u8::from(*fd)]);
                        out.extend_from_slice(&addr.to_le_bytes());
                        out.extend_from_slice(&(handle.len() as u16).to_le_bytes());
                        out.extend_from_slice(handle);
                    }
                }
            }
            Self::RegionAck { seq, refused } => {
                out.extend_from_slice(&seq.to_le_bytes());
                put_refusal(&mut out, refused.as_ref());
            }
            Self::Ready { regions } => out.extend_from_slice(&regions.to_le_bytes()),
            Self::Revoke { epoch, region } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(&region.to_le_bytes());
            }
            Self::RevokeAck { epoch } => out.extend_from_slice(&epoch.to_le_bytes()),
            Self::App(bytes) => out.extend_from_slice(&bytes[..bytes.len().min(MAX_APP)]),
            Self::AppTaken { count } => out.extend_from_slice(&count.to_le_bytes()),
            Self::Bye | Self::ByeAck => {}
        }
        let len = out.len() as u32;
        out[12..16].copy_from_slice(&len.to_le_bytes());
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// A refusal that names magic and version when those differ, [`RefusalCode::Garbage`] otherwise.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.get(..8) != Some(&MAGIC[..]) {
            return Err(Refusal::magic(bytes));
        }
        let mut r = Reader { rest: &bytes[8..] };
        let version = r.u16()?;
        if version != VERSION {
            return Err(Refusal::version(version));
        }
        let kind = r.u16()?;
        let len = r.u32()?;
        if len as usize != bytes.len() || bytes.len() > MAX_MESSAGE {
            return Err(garbage(format!(
                "message says {len} bytes and has {}",
                bytes.len()
            )));
        }
        let message = match kind {
            1 => Self::Hello(Hello {
                nonce: r.u64()?,
                pid: r.u32()?,
                holder: r.u32()?,
                table_len: r.u64()?,
                mailbox_len: r.u64()?,
                words_len: r.u64()?,
            }),
            2 => Self::Refuse(
                r.refusal()?
                    .ok_or_else(|| garbage("a refusal without a code"))?,
            ),
            3 => {
                let (id, seq, len) = (r.u32()?, r.u32()?, r.u64()?);
                let kind = match r.u8()? {
                    0 => RegionKind::Host {
                        writable: r.flag()?,
                    },
                    1 => {
                        let (fd, addr) = (r.flag()?, r.u64()?);
                        let bytes = usize::from(r.u16()?);
                        if bytes > MAX_HANDLE {
                            return Err(garbage(format!(
                                "device handle of {bytes} bytes, at most {MAX_HANDLE}"
                            )));
                        }
                        RegionKind::Device {
                            handle: r.take(bytes)?.to_vec(),
                            fd,
                            addr,
                        }
                    }
                    other => return Err(garbage(format!("region kind {other} is not known"))),
                };
                Self::RegionAdd { id, seq, len, kind }
            }
            4 => Self::RegionAck {
                seq: r.u32()?,
                refused: r.refusal()?,
            },
            5 => Self::Ready { regions: r.u32()? },
            6 => Self::Revoke {
                epoch: r.u64()?,
                region: r.u32()?,
            },
            7 => Self::RevokeAck { epoch: r.u64()? },
            8 => Self::Bye,
            9 => Self::ByeAck,
            10 => {
                let len = r.rest.len();
                if len > MAX_APP {
                    return Err(garbage(format!(
                        "application message of {len} bytes, at most {MAX_APP}"
                    )));
                }
                Self::App(r.take(len)?.to_vec())
            }
            11 => Self::AppTaken { count: r.u32()? },
            other => return Err(garbage(format!("message kind {other} is not known"))),
        };
        if r.rest.is_empty() {
            Ok(message)
        } else {
            Err(garbage(format!(
                "{} bytes after a message of kind {kind}",
                r.rest.len()
            )))
        }
    }
}

/// Code 0 stands for "none".
fn put_refusal(out: &mut Vec<u8>, refusal: Option<&Refusal>) {
    let (code, text) = refusal.map_or((0, ""), |r| (r.code as u32, r.text.as_str()));
    let mut end = text.len().min(Refusal::MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(end as u16).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

fn garbage(text: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::Garbage, text)
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Refusal> {
        let (head, tail) = self
            .rest
            .split_at_checked(n)
            .ok_or_else(|| garbage(format!("message ends {} bytes early", n - self.rest.len())))?;
        self.rest = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u8(&mut self) -> Result<u8, Refusal> {
        Ok(self.array::<1>()?[0])
    }

    fn flag(&mut self) -> Result<bool, Refusal> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(garbage(format!("flag of value {other}"))),
        }
    }

    fn u16(&mut self) -> Result<u16, Refusal> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Refusal> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Refusal> {
        self.array().map(u64::from_le_bytes)
    }

    fn refusal(&mut self) -> Result<Option<Refusal>, Refusal> {
        let code = self.u32()?;
        let len = usize::from(self.u16()?);
        if len > Refusal::MAX_TEXT {
            return Err(garbage(format!(
                "refusal text of {len} bytes, at most {}",
                Refusal::MAX_TEXT
            )));
        }
        // A peer's words end up in our logs: no control characters.
        let text: String = String::from_utf8_lossy(self.take(len)?)
            .chars()
            .filter(|c| !c.is_control())
            .collect();
        if code == 0 {
            return Ok(None);
        }
        let code = RefusalCode::from_u32(code)
            .ok_or_else(|| garbage(format!("refusal code {code} is not known")))?;
        Ok(Some(Refusal { code, text }))
    }
}

const _: () = assert!(
    HEADER + MAX_APP <= MAX_MESSAGE
        && HEADER + 4 + 4 + 8 + 12 + MAX_HANDLE <= MAX_MESSAGE
        && HEADER + 4 + 6 + Refusal::MAX_TEXT <= MAX_MESSAGE
);

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello = Hello {
        nonce: 1,
        pid: 2,
        holder: 3,
        table_len: 4,
        mailbox_len: 5,
        words_len: 6,
    };

    fn samples() -> Vec<Message> {
        let refusal = Refusal::new(RefusalCode::Size, "memfd has 1 byte, wanted 2");
        vec![
            Message::Hello(HELLO),
            Message::Refuse(refusal.clone()),
            Message::RegionAdd {
                id: 7,
                seq: 9,
                len: u64::MAX,
                kind: RegionKind::Host { writable: true },
            },
            Message::RegionAdd {
                id: 7,
                seq: 9,
                len: 1,
                kind: RegionKind::Device {
                    handle: vec![1; MAX_HANDLE],
                    fd: true,
                    addr: 9,
                },
            },
            Message::RegionAck {
                seq: 9,
                refused: None,
            },
            Message::RegionAck {
                seq: 9,
                refused: Some(refusal),
            },
            Message::Ready { regions: 3 },
            Message::Revoke {
                epoch: 5,
                region: NO_REGION,
            },
            Message::RevokeAck { epoch: 5 },
            Message::Bye,
            Message::ByeAck,
            Message::App(vec![7; MAX_APP]),
            Message::AppTaken { count: 3 },
        ]
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for message in samples() {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_MESSAGE);
            assert_eq!(Message::decode(&bytes), Ok(message));
        }
    }

    #[test]
    fn the_bytes_of_hello_are_fixed() {
        let mut wanted = b"DOORBELL\x02\x00\x01\x00\x38\x00\x00\x00".to_vec();
        wanted.extend_from_slice(&1u64.to_le_bytes());
        wanted.extend_from_slice(b"\x02\x00\x00\x00\x03\x00\x00\x00");
        for v in [4u64, 5, 6] {
            wanted.extend_from_slice(&v.to_le_bytes());
        }
        assert_eq!(Message::Hello(HELLO).encode(), wanted);
    }

    #[test]
    fn truncated_and_extended_messages_are_garbage() {
        for message in samples() {
            let bytes = message.encode();
            for cut in 8..bytes.len() {
                assert_eq!(
                    Message::decode(&bytes[..cut]).unwrap_err().code,
                    RefusalCode::Garbage
                );
                // With a length that agrees, the body is what is short (one of any length is a message).
                let mut short = bytes[..cut].to_vec();
                if cut >= HEADER && !matches!(message, Message::App(_)) {
                    short[12..16].copy_from_slice(&(cut as u32).to_le_bytes());
                    assert_eq!(
                        Message::decode(&short).unwrap_err().code,
                        RefusalCode::Garbage
                    );
                }
            }
            if matches!(message, Message::App(_)) {
                continue;
            }
            let mut long = bytes.clone();
            long.push(0);
            let len = long.len() as u32;
            long[12..16].copy_from_slice(&len.to_le_bytes());
            assert_eq!(
                Message::decode(&long).unwrap_err().code,
                RefusalCode::Garbage
            );
        }
    }

    #[test]
    fn another_magic_or_version_is_named() {
        let mut bytes = Message::Bye.encode();
        bytes[8] = 9;
        let refusal = Message::decode(&bytes).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::Version);
        assert!(
            refusal.text.contains("DOORBELL")
                && refusal.text.contains("version 9")
                && refusal.text.contains("version 2"),
            "{refusal}"
        );
        let refusal = Message::decode(b"GET / HTTP/1.1\r\n").unwrap_err();
        assert_eq!(refusal.code, RefusalCode::Magic);
        assert!(
            refusal.text.contains("GET / HT") && refusal.text.contains("DOORBELL"),
            "{refusal}"
        );
        assert_eq!(Message::decode(b"").unwrap_err().code, RefusalCode::Magic);
    }

    #[test]
    fn any_single_changed_byte_is_a_message_or_a_refusal() {
        for message in samples() {
            let bytes = message.encode();
            for at in 0..bytes.len() {
                for flip in [1u8, 0x80, 0xff] {
                    let mut changed = bytes.clone();
                    changed[at] ^= flip;
                    if let Ok(other) = Message::decode(&changed) {
                        // What decodes must also be a message this side could have written.
                        assert!(other.encode().len() <= MAX_MESSAGE);
                    }
                }
            }
        }
    }

    #[test]
    fn a_refusal_text_is_cut_at_a_character_and_cleaned() {
        let long = Refusal::new(RefusalCode::Busy, "é".repeat(200));
        let Ok(Message::Refuse(got)) = Message::decode(&Message::Refuse(long).encode()) else {
            panic!()
        };
        assert_eq!(got.text, "é".repeat(Refusal::MAX_TEXT / 2));
        let nasty = Refusal::new(RefusalCode::Busy, "a\x1b[2Jb\n");
        let Ok(Message::Refuse(got)) = Message::decode(&Message::Refuse(nasty).encode()) else {
            panic!()
        };
        assert_eq!(got.text, "a[2Jb");
    }
}
