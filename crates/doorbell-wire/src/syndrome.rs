//! Why a work request failed: the IB-level syndrome and the vendor's own code, as an error CQE carries them.
//!
//! Syndromes are mlx5's (rdma-core `MLX5_CQE_SYNDROME_*`); the vendor byte is free for the device, and these are ours.
//! Both are newtypes over the byte, so that a byte nobody knows is still a value that can be printed.

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$cdoc:meta])* $const:ident = $value:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(pub u8);

        impl $name {
            $(
                #[doc = concat!($text, ".")]
                $(#[$cdoc])*
                pub const $const: Self = Self($value);
            )*

            /// Every named code.
            pub const ALL: &'static [Self] = &[$(Self::$const),*];

            /// The constant's name, or `None` for a byte without one.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($const)),)*
                    _ => None,
                }
            }

            /// What it means, in words.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self.0 {
                    $($value => $text,)*
                    _ => "not a code that Doorbell knows",
                }
            }
        }

        /// `NAME (0xNN): meaning`.
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{} ({:#04x}): {}", self.name().unwrap_or("UNKNOWN"), self.0, self.meaning())
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, concat!(stringify!($name), "({})"), name),
                    None => write!(f, concat!(stringify!($name), "({:#04x})"), self.0),
                }
            }
        }
    };
}

codes! {
    /// The syndrome of an error CQE (byte 55).
    Syndrome {
        NONE = 0x00, "no error";
        LOCAL_LENGTH = 0x01, "the message is longer than the local buffer or the transport allows";
        LOCAL_QP_OP = 0x02, "the work request itself is malformed or not allowed on this QP";
        LOCAL_PROT = 0x04, "a local key does not cover the local memory, or not with this access";
        WR_FLUSH = 0x05, "flushed: an earlier work request had already put the QP into error";
        MW_BIND = 0x06, "a memory window could not be bound";
        BAD_RESP = 0x10, "the responder answered with something unexpected";
        LOCAL_ACCESS = 0x11, "the responder's local memory refused incoming data";
        REMOTE_INVAL_REQ = 0x12, "the responder found the request invalid";
        REMOTE_ACCESS = 0x13, "a remote key does not cover the remote memory, or not with this access";
        REMOTE_OP = 0x14, "the responder could not complete the operation";
        TRANSPORT_RETRY = 0x15, "the peer did not answer within the transport's retries";
        RNR_RETRY = 0x16, "the receiver had no receive posted within the retries";
        REMOTE_ABORTED = 0x22, "the responder aborted the operation";
    }
}

codes! {
    /// The vendor syndrome of an error CQE (byte 54), as Doorbell's software HCA sets it.
    Vendor {
        NONE = 0x00, "nothing more to say";
        BAD_OPCODE = 0x81, "the opcode is unknown";
        BAD_DS = 0x82, "the size (ds) does not fit the opcode or the ring";
        BAD_QPN = 0x83, "the control segment or the doorbell names another QP";
        STALE_INDEX = 0x84, "the slot was rung, but its control segment never got the expected index";
        BAD_DOORBELL = 0x85, "the doorbell or the record jumped by more than the queue's depth";
        BAD_LKEY = 0x86, "no memory region has this lkey";
        LKEY_RANGE = 0x87, "the local address range leaves the region of its lkey";
        LKEY_ACCESS = 0x88, "the local region does not allow this access";
        BAD_RKEY = 0x89, "no memory region of the peer has this rkey";
        RKEY_RANGE = 0x8a, "the remote address range leaves the region of its rkey";
        RKEY_ACCESS = 0x8b, "the remote region does not allow this access";
        MISALIGNED = 0x8c, "an atomic's address is not a multiple of its width";
        BAD_LENGTH = 0x8d, "a length is zero, or too large, or not the atomic's width";
        BAD_INLINE = 0x8e, "inline data where the opcode allows none, or longer than the WQE";
        UNSIGNALLED_PER_SLOT = 0x8f, "an unsignalled or multi-slot WQE on a CQ with one CQE a slot";
        BAD_OPMOD = 0x90, "the opcode modifier does not fit the opcode";
        BAD_WAIT_CQ = 0x91, "WAIT names a CQ that does not exist or cannot be waited for";
        PEER_DEAD = 0x92, "the target QP is in error or gone, or the peer's process is";
        REVOKED = 0x93, "the memory region was deregistered";
        ENGINE_DOWN = 0x94, "the engine that served the QP has stopped";
        DMA_FAILED = 0x95, "copying to or from GPU memory failed";
        NOT_CONNECTED = 0x96, "the QP is not connected";
        NO_RECEIVE = 0x97, "the receiver has no receive posted";
        DESTROYED = 0x98, "the QP was destroyed";
        UNSUPPORTED = 0x99, "a valid request that this HCA does not implement";
        PD_MISMATCH = 0x9a, "the memory region belongs to another protection domain";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_prints() {
        for byte in 0..=255u8 {
            let (s, v) = (Syndrome(byte), Vendor(byte));
            assert_eq!(s.name().is_some(), Syndrome::ALL.contains(&s));
            assert_eq!(v.name().is_some(), Vendor::ALL.contains(&v));
            assert!(std::format!("{s} {v} {s:?} {v:?}").contains(&std::format!("{byte:#04x}")));
        }
        assert_eq!(
            std::format!("{}", Syndrome::WR_FLUSH),
            "WR_FLUSH (0x05): flushed: an earlier work request had already put the QP into error"
        );
        assert_eq!(std::format!("{:?}", Vendor::BAD_RKEY), "Vendor(BAD_RKEY)");
    }

    #[test]
    fn vendor_codes_are_contiguous() {
        // ARCHITECTURE.md prints them as one table; a gap or a double would go unnoticed there.
        for (i, v) in Vendor::ALL.iter().skip(1).enumerate() {
            assert_eq!(usize::from(v.0), 0x81 + i);
        }
    }
}
