//! What can be wrong with a work request, a doorbell or a QP, and what the engine answers: the table of faults.
//! One row per fault: syndrome (mlx5's values), vendor syndrome (ours), when it is raised. Every fault puts the QP into the
//! error state: its first error is recorded, an error CQE is written, and every later WQE is flushed with `WR_FLUSH`.

use doorbell_wire::{Syndrome, Vendor, WqeError};

/// Why a work request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs, reason = "each variant is described by its row in TABLE")]
pub enum Fault {
    BadOpcode,
    BadOpmod,
    BadDs,
    BadQpn,
    StaleIndex,
    BadDoorbell,
    BadLength,
    BadInline,
    UnsignalledPerSlot,
    BadWaitCq,
    BadLkey,
    LkeyRevoked,
    LkeyPd,
    LkeyAccess,
    LkeyRange,
    BadRkey,
    RkeyRevoked,
    RkeyPd,
    RkeyAccess,
    RkeyRange,
    Misaligned,
    NotConnected,
    PeerDead,
    NoReceive,
    ReceiveTooShort,
    ReceiveRefused,
    DmaFailed,
    EngineDown,
    Destroyed,
    Unsupported,
    PeerRefused,
    RemoteAccess,
    RemoteInvalid,
    RemoteOperational,
    RetryExceeded,
    RnrExceeded,
    BadResponse,
    PortDown,
    Flushed,
}

/// One row of the table of faults.
#[derive(Clone, Copy, Debug)]
pub struct FaultRow {
    /// The fault.
    pub fault: Fault,
    /// The syndrome of the error CQE (byte 55).
    pub syndrome: Syndrome,
    /// The vendor syndrome of the error CQE (byte 54).
    pub vendor: Vendor,
    /// When it is raised.
    pub when: &'static str,
}

macro_rules! table {
    ($($fault:ident, $syndrome:ident, $vendor:expr, $when:literal;)*) => {
        /// Every fault, in the order of [`Fault`].
        pub const TABLE: &[FaultRow] = &[$(FaultRow {
            fault: Fault::$fault,
            syndrome: Syndrome::$syndrome,
            vendor: $vendor,
            when: $when,
        }),*];
    };
}

table! {
    BadOpcode, LOCAL_QP_OP, Vendor::BAD_OPCODE, "the control segment holds an opcode that the engine does not execute";
    BadOpmod, LOCAL_QP_OP, Vendor::BAD_OPMOD, "the opcode modifier does not fit the opcode (masked atomics: 8 for 4 bytes, 9 for 8 bytes; else 0)";
    BadDs, LOCAL_QP_OP, Vendor::BAD_DS, "the count of 16-byte units does not fit the opcode, is 0, or goes past what was rung";
    BadQpn, LOCAL_QP_OP, Vendor::BAD_QPN, "the control segment or the doorbell names another QP";
    StaleIndex, LOCAL_QP_OP, Vendor::STALE_INDEX, "the control segment still carried another WQE index after re-reading it for the time allowed";
    BadDoorbell, LOCAL_QP_OP, Vendor::BAD_DOORBELL, "the producer index jumped further than the queue is deep";
    BadLength, LOCAL_LENGTH, Vendor::BAD_LENGTH, "a DUMP of zero bytes, a message above 2^31 bytes or longer than the receive that it found, or an atomic's result of another size than its operand";
    BadInline, LOCAL_QP_OP, Vendor::BAD_INLINE, "the inline length goes past the end of the WQE, or the opcode takes no inline data";
    UnsignalledPerSlot, LOCAL_QP_OP, Vendor::UNSIGNALLED_PER_SLOT, "an unsignalled or several-slot WQE on a QP whose CQ has one CQE per slot";
    BadWaitCq, LOCAL_QP_OP, Vendor::BAD_WAIT_CQ, "WAIT names a CQ that does not exist (any more)";
    BadLkey, LOCAL_PROT, Vendor::BAD_LKEY, "the local key names no memory region";
    LkeyRevoked, LOCAL_PROT, Vendor::REVOKED, "the local key named a memory region that was deregistered";
    LkeyPd, LOCAL_PROT, Vendor::PD_MISMATCH, "the local key belongs to another protection domain";
    LkeyAccess, LOCAL_PROT, Vendor::LKEY_ACCESS, "the local region may not be written (READ, atomics)";
    LkeyRange, LOCAL_PROT, Vendor::LKEY_RANGE, "the local range is not inside the region";
    BadRkey, REMOTE_ACCESS, Vendor::BAD_RKEY, "the remote key names no memory region";
    RkeyRevoked, REMOTE_ACCESS, Vendor::REVOKED, "the remote key named a memory region that was deregistered";
    RkeyPd, REMOTE_ACCESS, Vendor::PD_MISMATCH, "the remote key belongs to another protection domain than the target QP";
    RkeyAccess, REMOTE_ACCESS, Vendor::RKEY_ACCESS, "the remote region does not grant this access";
    RkeyRange, REMOTE_ACCESS, Vendor::RKEY_RANGE, "the remote range is not inside the region";
    Misaligned, REMOTE_INVAL_REQ, Vendor::MISALIGNED, "the target of an atomic is not aligned to its size";
    NotConnected, LOCAL_QP_OP, Vendor::NOT_CONNECTED, "a WQE was rung on a QP that was never connected";
    PeerDead, TRANSPORT_RETRY, Vendor::PEER_DEAD, "the target QP is in error or destroyed, or its process is gone";
    NoReceive, RNR_RETRY, Vendor::NO_RECEIVE, "SEND or WRITE with immediate found no receive WQE at the target within the time allowed";
    ReceiveTooShort, REMOTE_INVAL_REQ, Vendor::BAD_LENGTH, "a SEND is longer than the receive that it found at the target, which fails too (`BadLength`)";
    ReceiveRefused, REMOTE_OP, Vendor::LKEY_ACCESS, "the memory of the receive that a SEND found at the target may not be written; the target fails too and says why";
    DmaFailed, LOCAL_QP_OP, Vendor::DMA_FAILED, "the copy engine refused or failed a transfer to or from GPU memory";
    EngineDown, LOCAL_QP_OP, Vendor::ENGINE_DOWN, "the engine thread of this QP died";
    Destroyed, WR_FLUSH, Vendor::DESTROYED, "the QP was destroyed or failed by its owner";
    Unsupported, LOCAL_QP_OP, Vendor::UNSUPPORTED, "the request is valid, but not on this link or memory";
    PeerRefused, LOCAL_ACCESS, Vendor::RKEY_ACCESS, "over RoCE and verbs: a request of the peer was refused (key, range, rights, or malformed), and this queue pair stopped";
    RemoteAccess, REMOTE_ACCESS, Vendor::NONE, "over RoCE: the peer refused the key, the range or the access; which of them only it knows";
    RemoteInvalid, REMOTE_INVAL_REQ, Vendor::NONE, "over RoCE: the peer found the request malformed or not allowed on its queue pair";
    RemoteOperational, REMOTE_OP, Vendor::NONE, "over RoCE: the peer could not carry out the request";
    RetryExceeded, TRANSPORT_RETRY, Vendor::NONE, "over RoCE: the peer did not acknowledge within the time-outs";
    RnrExceeded, RNR_RETRY, Vendor::NONE, "over RoCE: the peer had no receive posted for as long as its retry count allows";
    BadResponse, BAD_RESP, Vendor::NONE, "over RoCE: the peer's answer does not fit the request";
    PortDown, TRANSPORT_RETRY, Vendor::ENGINE_DOWN, "over RoCE: the packet port of this engine core failed; over verbs: the device is gone or stopped, or its port went down";
    Flushed, WR_FLUSH, Vendor::NONE, "an earlier WQE failed; this one was not executed";
}

impl Fault {
    /// Its row in the table.
    pub fn row(self) -> &'static FaultRow {
        &TABLE[self as usize]
    }

    /// Both syndromes of the error CQE.
    pub(crate) fn syndromes(self) -> (Syndrome, Vendor) {
        (self.syndrome(), self.vendor())
    }

    /// The syndrome of the error CQE.
    pub fn syndrome(self) -> Syndrome {
        self.row().syndrome
    }

    /// The vendor syndrome of the error CQE.
    pub fn vendor(self) -> Vendor {
        self.row().vendor
    }
}

impl From<WqeError> for Fault {
    fn from(error: WqeError) -> Self {
        match error {
            WqeError::Truncated { .. } | WqeError::Ds { .. } => Self::BadDs,
            WqeError::Opcode { .. } => Self::BadOpcode,
            WqeError::Opmod { .. } => Self::BadOpmod,
            WqeError::Length { .. } => Self::BadLength,
            WqeError::Inline { .. } | WqeError::InlineNotAllowed { .. } => Self::BadInline,
            WqeError::Misaligned { .. } => Self::Misaligned,
            WqeError::Cqn { .. } => Self::BadWaitCq,
        }
    }
}

impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.row().when)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_the_enum_and_distinct() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.fault as usize, i, "{:?} is out of order", row.fault);
            for other in &TABLE[..i] {
                assert!(
                    (row.syndrome, row.vendor) != (other.syndrome, other.vendor),
                    "{:?} and {:?} cannot be told apart",
                    row.fault,
                    other.fault
                );
            }
        }
        assert_eq!(TABLE.len(), Fault::Flushed as usize + 1);
    }
}
