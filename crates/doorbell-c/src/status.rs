//! What a call returns: 0, or a negative number of a fixed list.
//!
//! The numbers are ABI: they are never reused, and new ones are added at the end. `doorbell.h` has the same list,
//! and a test compares the two.

/// The status of a call. Statuses are data; the text for people is what `doorbell_last_error` gives.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "documented in `ALL`, once for C and Rust")]
pub enum Status {
    Ok = 0,
    Invalid = -1,
    Handle = -2,
    Version = -3,
    Unsupported = -4,
    NoGpu = -5,
    NoMemory = -6,
    TimedOut = -7,
    State = -8,
    Completion = -9,
    Peer = -10,
    System = -11,
    Internal = -12,
}

/// Every status: its name in C, and its meaning.
pub const ALL: &[(Status, &str, &str)] = &[
    (Status::Ok, "DOORBELL_OK", "it worked"),
    (
        Status::Invalid,
        "DOORBELL_ERR_INVALID",
        "an argument is out of range or NULL",
    ),
    (
        Status::Handle,
        "DOORBELL_ERR_HANDLE",
        "the handle is unknown: never created, of another kind, or already destroyed",
    ),
    (
        Status::Version,
        "DOORBELL_ERR_VERSION",
        "a structure or a peer is of a version that this library does not know",
    ),
    (
        Status::Unsupported,
        "DOORBELL_ERR_UNSUPPORTED",
        "this device or build cannot do it",
    ),
    (
        Status::NoGpu,
        "DOORBELL_ERR_NO_GPU",
        "the GPU that was asked for is not there, or its driver refused",
    ),
    (
        Status::NoMemory,
        "DOORBELL_ERR_NO_MEMORY",
        "memory of the kind that was asked for cannot be had",
    ),
    (
        Status::TimedOut,
        "DOORBELL_ERR_TIMED_OUT",
        "the time given ran out",
    ),
    (
        Status::State,
        "DOORBELL_ERR_STATE",
        "the object is in a state that does not allow it",
    ),
    (
        Status::Completion,
        "DOORBELL_ERR_COMPLETION",
        "a work request ended in an error; doorbell_qp_error has the syndromes",
    ),
    (
        Status::Peer,
        "DOORBELL_ERR_PEER",
        "the peer process is gone or refused",
    ),
    (
        Status::System,
        "DOORBELL_ERR_SYSTEM",
        "the operating system refused",
    ),
    (
        Status::Internal,
        "DOORBELL_ERR_INTERNAL",
        "a fault of the library itself; please report it",
    ),
];

impl Status {
    /// The status with this number.
    pub fn from_raw(raw: i32) -> Option<Self> {
        ALL.iter()
            .map(|(status, ..)| *status)
            .find(|status| *status as i32 == raw)
    }
}
