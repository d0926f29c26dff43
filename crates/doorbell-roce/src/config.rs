//! What two QPs agree on before they talk.

use doorbell_wire::roce::{Psn, Transport};

/// A path MTU: the payload of a full packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    M256,
    /// 512 bytes.
    M512,
    /// 1,024 bytes.
    M1024,
    /// 2,048 bytes.
    M2048,
    /// 4,096 bytes.
    M4096,
    /// 61,696 bytes: none of InfiniBand's, for two ends of one host that agreed on it, where a packet is as long as the kernel takes a datagram.
    /// 1 MiB is 17 of them.
    Long,
}

impl Mtu {
    /// InfiniBand's, smallest first.
    pub const ALL: [Self; 5] = [
        Self::M256,
        Self::M512,
        Self::M1024,
        Self::M2048,
        Self::M4096,
    ];

    /// Bytes of payload.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Long => 61_696,
            _ => 256 << self as u32,
        }
    }

    /// The largest of InfiniBand's with at most `bytes` of payload; `None` below 256.
    pub fn fitting(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|m| m.bytes() <= bytes)
    }

    /// The encoding of `enum ibv_mtu`: 1 to 5 (6, which has no other meaning, for [`Mtu::Long`]).
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// From the encoding of `enum ibv_mtu`.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.code() == code)
    }
}

/// One end of a connection. Field names and encodings are those of `ibv_modify_qp`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// RC or UC.
    pub transport: Transport,
    /// The peer's QP number, 24 bits. 0 for a UC receiver whose sender is not known.
    pub dest_qpn: u32,
    /// First PSN that we send; draw it at random, so that packets of an earlier life of the QP are strangers.
    pub sq_psn: Psn,
    /// First PSN that the peer sends.
    pub rq_psn: Psn,
    /// Payload of a full packet; the same at both ends.
    pub path_mtu: Mtu,
    /// READs and atomics that we have open at the peer at a time, 0 to 255 (0: none may be posted). At most the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
    /// READs and atomics that the peer may have open here.
    pub max_dest_rd_atomic: u8,
    /// Local ACK timeout, five bits: 4.096 µs · 2^n a try; 0: never, the peer is trusted to come back.
    pub timeout: u8,
    /// Tries after the first, 0 to 7.
    pub retry_cnt: u8,
    /// Tries after "receiver not ready"; 7: for ever.
    pub rnr_retry: u8,
    /// The time code that we ask for when no receive is posted here (see [`doorbell_wire::roce::rnr_timer_ns`]).
    pub min_rnr_timer: u8,
    /// Unacknowledged packets, at most; what the receive buffer of the peer's port holds. At least 4.
    pub window: u32,
    /// Unacknowledged bytes of messages, at most, but for one packet that is longer; the same buffer where packets are long.
    pub window_bytes: u32,
    /// Messages posted and not completed, at most.
    pub messages: usize,
}

impl Default for Config {
    /// RC, path MTU 1024, and the values that verbs examples use.
    fn default() -> Self {
        Self {
            transport: Transport::Rc,
            dest_qpn: 0,
            sq_psn: Psn::new(0),
            rq_psn: Psn::new(0),
            path_mtu: Mtu::M1024,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            window: 128,
            window_bytes: u32::MAX,
            messages: 1024,
        }
    }
}

/// A configuration that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: it has to be {allowed}")]
pub struct ConfigError {
    /// The field.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// What it may be.
    pub allowed: &'static str,
}

impl Config {
    /// Checks every field.
    ///
    /// # Errors
    /// The first that is out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let rows: [(&'static str, u64, bool, &'static str); 8] = [
            (
                "dest_qpn",
                u64::from(self.dest_qpn),
                self.dest_qpn < 1 << 24,
                "below 2^24",
            ),
            (
                "timeout",
                u64::from(self.timeout),
                self.timeout < 32,
                "0 to 31",
            ),
            (
                "retry_cnt",
                u64::from(self.retry_cnt),
                self.retry_cnt < 8,
                "0 to 7",
            ),
            (
                "rnr_retry",
                u64::from(self.rnr_retry),
                self.rnr_retry < 8,
                "0 to 7",
            ),
            (
                "min_rnr_timer",
                u64::from(self.min_rnr_timer),
                self.min_rnr_timer < 32,
                "0 to 31",
            ),
            (
                "window",
                u64::from(self.window),
                (4..1 << 22).contains(&self.window),
                "4 to 2^22 - 1",
            ),
            (
                "window_bytes",
                u64::from(self.window_bytes),
                self.window_bytes > 0,
                "at least 1",
            ),
            (
                "messages",
                self.messages as u64,
                self.messages > 0,
                "at least 1",
            ),
        ];
        match rows.into_iter().find(|row| !row.2) {
            None => Ok(()),
            Some((field, value, _, allowed)) => Err(ConfigError {
                field,
                value,
                allowed,
            }),
        }
    }

    /// How long a message may go without an answer before it fails, ns; `None`: for ever.
    pub fn patience_ns(&self) -> Option<u64> {
        (self.timeout != 0).then(|| (4096_u64 << self.timeout) * (u64::from(self.retry_cnt) + 1))
    }
}
