//! Every ordered memory access of the device code, in one table: what it orders, how strong it is, among whom.
//!
//! `docs/mutations.md` shows, for each, which test turns red when it is weakened. An access that is not in this table is either a
//! constant of the queue, or private to the thread, or a piece of a WQE that some site here publishes.

use crate::arch::{At, MemScope, Order};

macro_rules! sites {
    ($($(#[$doc:meta])+ $name:ident = $order:ident $scope:ident;)+) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(u8)]
        enum Number { $($name),+ }
        $($(#[$doc])+ pub const $name: At = At {
            site: Number::$name as u8,
            order: Order::$order,
            scope: MemScope::$scope,
        };)+
        /// All of them with their names, in the order of their numbers.
        pub const ALL: &[(&str, At)] = &[$((stringify!($name), $name)),+];
    };
}

sites! {
    /// Reservation: first look at `sq_rsvd_index`; the compare-and-swap decides.
    RESERVE_LOAD = Relaxed Gpu;
    /// Reservation: hands out slots. Orders nothing: what makes a slot free is ordered by `CI_LOAD` and `CQE_LOAD`.
    RESERVE_CAS = Relaxed Gpu;
    /// Reservation without the availability check.
    RESERVE_ADD = Relaxed Gpu;
    /// Consumer index as others left it: the engine's reads of the slots below it come before our writes to them.
    CI_LOAD = Acquire Gpu;
    /// Passes on what a poll of the CQ learned, to whoever reads it at `CI_LOAD`.
    CI_MAX = Release Gpu;
    /// Our WQEs come before what publishes them. A fence of its own, ahead of the wait for our turn, so that its cost is not
    /// part of the chain of posters that wait for one another.
    PUBLISH_FENCE = Release Gpu;
    /// Waiting for those who reserved before us to publish.
    PUBLISH_WAIT = Relaxed Gpu;
    /// Publishes our WQEs and takes the ringing on if nobody has it. Acquire: whoever rings next stores its doorbell after the
    /// last one's (`RING_DONE`), and answers for WQEs published by others without ringing.
    PUBLISH_EXCH = Acquire Gpu;
    /// Publishes our WQEs and leaves the ringing for later.
    PUBLISH_ADD = Relaxed Gpu;
    /// Takes the ringing on, for WQEs published without it.
    RING_CLAIM = AcqRel Gpu;
    /// All WQEs that this thread wrote or acquired become visible to the engine before the doorbell does.
    RING_FENCE = Release Sys;
    /// A NIC may act on the record alone, so its record must come after the WQEs and before the doorbell: the second fence.
    RING_RECORD_FENCE = Release Sys;
    /// The doorbell record.
    RING_RECORD = Relaxed Sys;
    /// The doorbell word or producer word in memory.
    RING_DOORBELL = Relaxed Sys;
    /// The producer word of a QP whose ringers do not take turns (bare QPs).
    RING_MAX = Relaxed Sys;
    /// `sq_wqe_pi`, for foreign code that looks at it.
    RING_PI = Relaxed Gpu;
    /// Gives the ringing up unless more was published. Acquire: the WQEs of whoever did. Release: our doorbell store comes
    /// before that of whoever rings next, so that the last value of the word is the newest.
    RING_DONE = AcqRel Gpu;
    /// Takes DOCA's submission lock (bare QPs).
    LOCK_TAKE = Acquire Gpu;
    /// Gives it back.
    LOCK_GIVE = Release Gpu;
    /// Waiting for those who took receives before us: their slots, and their record, come before ours.
    RECV_TURN = Acquire Gpu;
    /// Our receives, and those before them, become visible to the engine before the record does.
    RECV_FENCE = Release Sys;
    /// The receive doorbell record.
    RECV_RECORD = Relaxed Sys;
    /// Passes the turn on, with our receives and our record.
    RECV_NEXT = Release Gpu;
    /// A CQE's last word: what the operation wrote is visible after it, and the slot is ours again.
    CQE_LOAD = Acquire Sys;
    /// The body of an error CQE, or of a receive's, read after its last word.
    CQE_BODY = Relaxed Sys;
    /// The host's error word: what completed before the error is visible after it.
    HOST_ERROR_LOAD = Acquire Sys;
    /// Sets the first-error record, once.
    ERROR_SET = Relaxed Gpu;
    /// Reads it.
    ERROR_LOAD = Relaxed Gpu;
    /// Refuses later posts.
    POISON_SET = Relaxed Gpu;
    /// The state word, for the host.
    STATE_SET = Relaxed Gpu;
    /// How far the queue has been published (flush, ring).
    READY_LOAD = Relaxed Gpu;
    /// A word that a peer's signal or payload arrives in: what came before the signal is visible after it.
    SIGNAL_LOAD = Acquire Sys;
    /// The same, after relaxed polls of such a word.
    SIGNAL_FENCE = Acquire Sys;
    /// Kernel's answers and reports in memory that others read.
    REPORT_STORE = Release Sys;
    /// Words of a payload.
    DATA = Relaxed Sys;
    /// A kernel that the host may take its work from says that it has started, and only then looks whether that has happened: either it
    /// sees so, or the host sees that it has started.
    CLAIM_FENCE = SeqCst Sys;
    /// A kernel that takes no more work says so: all that it did, and looked at, comes before.
    LEAVE_STORE = Release Sys;
    /// A step of copies, by all threads of a block, comes before the next.
    STEP_FENCE = AcqRel Sys;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_index_the_table() {
        for (i, (name, at)) in ALL.iter().enumerate() {
            assert_eq!(i, usize::from(at.site), "{name}");
        }
    }
}
