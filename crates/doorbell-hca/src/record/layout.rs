//! Where everything is in a flight record, in 64-bit words of the host's byte order.
//!
//! One head (who, which cores, which regions, who waits), then one block a queue pair. Whoever reads it did not write it and
//! believes none of it: every number is checked before it is used, in `read`.

/// First word: "DBFLIGHT" in memory order.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"DBFLIGHT");
/// Version of this layout.
pub(super) const VERSION: u64 = 2;

/// Words of the head.
pub(super) mod head {
    pub(in crate::record) const MAGIC: usize = 0;
    pub(in crate::record) const VERSION: usize = 1;
    /// 1 once the head is complete.
    pub(in crate::record) const COMPLETE: usize = 2;
    pub(in crate::record) const PID: usize = 3;
    /// Start of the process in clock ticks since boot: tells it from a later one of the same number.
    pub(in crate::record) const STARTED: usize = 4;
    /// PID namespace, by its inode.
    pub(in crate::record) const NAMESPACE: usize = 5;
    /// Boot, two words of its identifier.
    pub(in crate::record) const BOOT: usize = 6;
    /// Number by which peers know the HCA.
    pub(in crate::record) const ID: usize = 8;
    /// [`ClockKind`](super::super::clock::ClockKind).
    pub(in crate::record) const CLOCK: usize = 9;
    /// The clock, and nanoseconds of the monotonic clock at the same moment.
    pub(in crate::record) const TICKS: usize = 10;
    pub(in crate::record) const NS: usize = 11;
    /// Engine cores.
    pub(in crate::record) const CORES: usize = 12;
    /// Blocks in the file.
    pub(in crate::record) const BLOCKS: usize = 13;
    /// Base-two logarithm of the events a block holds.
    pub(in crate::record) const LOG_EVENTS: usize = 14;
    /// Rank + 1 in a job, if it has one.
    pub(in crate::record) const RANK: usize = 15;
    /// 1: whoever waits runs the engine.
    pub(in crate::record) const CALLER: usize = 16;
    /// Regions for which there was no room.
    pub(in crate::record) const REGIONS_LEFT_OUT: usize = 17;
    /// Queue pairs for which there was no room in the file.
    pub(in crate::record) const QPS_LEFT_OUT: usize = 18;
    /// Rules of the fault script, and how often one of them fired.
    pub(in crate::record) const RULES: usize = 19;
    pub(in crate::record) const FIRINGS: usize = 20;
    /// Release, UTF-8, zero-padded.
    pub(in crate::record) const RELEASE: usize = 24;
    pub(in crate::record) const RELEASE_WORDS: usize = 4;
    /// Command line, likewise, its words separated by blanks.
    pub(in crate::record) const COMMAND: usize = 32;
    pub(in crate::record) const COMMAND_WORDS: usize = 32;
}

/// First core.
pub(super) const CORES: usize = 64;
/// Cores that have a place.
pub(super) const MAX_CORES: usize = 256;
/// Words of a core.
pub(super) const CORE_WORDS: usize = 8;

/// Words of a core.
pub(super) mod core {
    /// Rounds so far.
    pub(in crate::record) const ROUNDS: usize = 0;
    /// The clock as the core last read it.
    pub(in crate::record) const NOW: usize = 1;
    /// How much work may be done until it is read again.
    pub(in crate::record) const CREDIT: usize = 2;
    /// 1: it died.
    pub(in crate::record) const DEAD: usize = 3;
}

/// First wait.
pub(super) const WAITS: usize = CORES + MAX_CORES * CORE_WORDS;
/// Waits that have a place.
pub(super) const MAX_WAITS: usize = 64;
/// Words of a wait.
pub(super) const WAIT_WORDS: usize = 16;

/// Words of a wait.
pub(super) mod wait {
    /// Odd while it changes; 0: free.
    pub(in crate::record) const SEQ: usize = 0;
    /// [`WaitKind`](super::super::WaitKind).
    pub(in crate::record) const KIND: usize = 1;
    /// Address of the word, or number of the queue pair.
    pub(in crate::record) const AT: usize = 2;
    pub(in crate::record) const WANTED: usize = 3;
    pub(in crate::record) const HAVE: usize = 4;
    /// The clock when the wait began, and when it was last looked at.
    pub(in crate::record) const SINCE: usize = 5;
    pub(in crate::record) const SEEN: usize = 6;
    /// Thread.
    pub(in crate::record) const THREAD: usize = 7;
}

/// First region.
pub(super) const REGIONS: usize = WAITS + MAX_WAITS * WAIT_WORDS;
/// Regions that have a place.
pub(super) const MAX_REGIONS: usize = 1024;
/// Words of a region.
pub(super) const REGION_WORDS: usize = 8;

/// Words of a region.
pub(super) mod region {
    /// Key + 1, so that 0 is a free place.
    pub(in crate::record) const KEY: usize = 0;
    /// The address by which WQEs name its first byte.
    pub(in crate::record) const BASE: usize = 1;
    pub(in crate::record) const LEN: usize = 2;
    /// The owner's address of its first byte.
    pub(in crate::record) const ADDR: usize = 3;
    /// Protection domain, then rights << 32, then kind << 40.
    pub(in crate::record) const RIGHTS: usize = 4;
}

/// First rule of the fault script; the first so many have a place.
pub(super) const RULES: usize = REGIONS + MAX_REGIONS * REGION_WORDS;
/// Rules that have a place.
pub(super) const MAX_RULES: usize = 64;
/// Words of a rule.
pub(super) const RULE_WORDS: usize = 16;

/// Words of a rule.
pub(super) mod rule {
    /// How often it fired.
    pub(in crate::record) const FIRED: usize = 0;
    /// Rank + 1 that it is for, if that is another than this process's.
    pub(in crate::record) const ELSEWHERE: usize = 1;
    /// Its words, UTF-8, zero-padded.
    pub(in crate::record) const TEXT: usize = 2;
    pub(in crate::record) const TEXT_WORDS: usize = super::RULE_WORDS - TEXT;
}

/// First firing: the first half of the places keep the first ones, the rest the latest.
pub(super) const FIRINGS: usize = RULES + MAX_RULES * RULE_WORDS;
/// Firings that have a place.
pub(super) const MAX_FIRINGS: usize = 64;
/// Words of a firing.
pub(super) const FIRING_WORDS: usize = 32;

/// Words of a firing.
pub(super) mod firing {
    /// Its number, from 1; 0: none, or it is being written.
    pub(in crate::record) const NUMBER: usize = 0;
    /// Rule, from 1, then core << 32.
    pub(in crate::record) const RULE: usize = 1;
    /// Queue pair + 1, or 0.
    pub(in crate::record) const QPN: usize = 2;
    /// Work request + 1, or 0.
    pub(in crate::record) const INDEX: usize = 3;
    /// [`RECEIVE`], [`IDLE`]; the action's place in the list of actions << 8.
    pub(in crate::record) const FLAGS: usize = 4;
    /// When, and until when it lasts (0: for good): nanoseconds of the monotonic clock.
    pub(in crate::record) const AT: usize = 5;
    pub(in crate::record) const UNTIL: usize = 6;
    /// What came of it, UTF-8, zero-padded.
    pub(in crate::record) const NOTE: usize = 8;
    pub(in crate::record) const NOTE_WORDS: usize = super::FIRING_WORDS - NOTE;
    /// It is a receive.
    pub(in crate::record) const RECEIVE: u64 = 1;
    /// It changed nothing.
    pub(in crate::record) const IDLE: u64 = 2;
}

/// First death of an engine core.
pub(super) const DEATHS: usize = FIRINGS + MAX_FIRINGS * FIRING_WORDS;
/// Deaths that have a place.
pub(super) const MAX_DEATHS: usize = 8;
/// Words of a death: core + 1, then why, UTF-8, zero-padded.
pub(super) const DEATH_WORDS: usize = 32;

/// Words of the head, a whole number of pages of 4 KiB.
pub(super) const HEAD_WORDS: usize =
    (DEATHS + MAX_DEATHS * DEATH_WORDS).next_multiple_of(PAGE_WORDS);
/// Words of a page.
pub(super) const PAGE_WORDS: usize = 512;

/// Words of a queue pair's block, before its snapshot.
pub(super) mod qp {
    /// What the engine writes at every event: events so far, slots rung, executed, complete.
    pub(in crate::record) const HEAD: usize = 0;
    pub(in crate::record) const RUNG: usize = 1;
    pub(in crate::record) const EXECUTED: usize = 2;
    pub(in crate::record) const COMPLETED: usize = 3;
    /// Slots that the engine has seen written and not rung.
    pub(in crate::record) const POSTED: usize = 4;
    /// State, and the first error as an error word.
    pub(in crate::record) const STATE: usize = 5;
    pub(in crate::record) const ERROR: usize = 6;
    /// Constants from here on; 0 in the first: a free block. QP number, CQ number << 32.
    pub(in crate::record) const NUMBERS: usize = 8;
    /// Core, slot << 32.
    pub(in crate::record) const OWNER: usize = 9;
    /// log2 of the depth, handler << 8, CQ kind << 16, log2 of the receives + 1 << 32.
    pub(in crate::record) const SHAPE: usize = 10;
    /// Protection domain.
    pub(in crate::record) const PD: usize = 11;
    /// Addresses in the process: ring, CQ, record, doorbell word.
    pub(in crate::record) const RING: usize = 12;
    pub(in crate::record) const CQ: usize = 13;
    pub(in crate::record) const RECORD: usize = 14;
    pub(in crate::record) const DOORBELL: usize = 15;
    /// Kind of the target, its QP number << 32.
    pub(in crate::record) const TARGET: usize = 16;
    /// Address of the poster's structure in host memory, or 0.
    pub(in crate::record) const POSTER: usize = 19;
}

/// The snapshot that the engine takes now and then of what stands in the queue.
pub(super) const STILL: usize = 64;

/// Words of a snapshot. All of it is of one moment.
pub(super) mod still {
    /// Odd while it changes; 0: none.
    pub(in crate::record) const SEQ: usize = 0;
    /// The clock.
    pub(in crate::record) const AT: usize = 1;
    /// First slot in it, which is the first that is not complete, and how many.
    pub(in crate::record) const FIRST: usize = 2;
    pub(in crate::record) const SLOTS: usize = 3;
    /// The record, and the doorbell word.
    pub(in crate::record) const RECORD: usize = 4;
    pub(in crate::record) const DOORBELL: usize = 5;
    /// What the QP is set aside for.
    pub(in crate::record) const PARKED: usize = 6;
    /// The clock when a snapshot was first like this one: since then nothing has moved.
    pub(in crate::record) const SINCE: usize = 7;
    /// Reserved, ready, rung, consumed; meaningful if the block names the poster's structure.
    pub(in crate::record) const POSTER: usize = 8;
    /// Slots rung, as the engine saw it.
    pub(in crate::record) const RUNG: usize = 12;
    /// One more than the newest slot that a collapsed CQ ought to show.
    pub(in crate::record) const NEWEST: usize = 13;
    /// One more than the first slot whose CQE is not as the engine wrote it; 0: none is known.
    pub(in crate::record) const LACKS: usize = 14;
    /// One more than the first receive of which that is true.
    pub(in crate::record) const RECV_LACKS: usize = 15;
    /// The newest CQE, 8 words.
    pub(in crate::record) const CQE: usize = 16;
    /// A [`doorbell_device::layout::WaitNote`], 6 words.
    pub(in crate::record) const NOTE: usize = 24;
    /// Receives posted + 1 (0: there is no receive queue), and filled.
    pub(in crate::record) const RECV_POSTED: usize = 30;
    pub(in crate::record) const RECV_DONE: usize = 31;
    /// Slots, 8 words each.
    pub(in crate::record) const RING: usize = 32;
    pub(in crate::record) const MAX_SLOTS: usize = 16;
    /// The CQEs of `LACKS` and `RECV_LACKS`, 8 words each.
    pub(in crate::record) const LACKS_CQE: usize = RING + MAX_SLOTS * 8;
    pub(in crate::record) const RECV_LACKS_CQE: usize = LACKS_CQE + 8;
    pub(in crate::record) const WORDS: usize = RECV_LACKS_CQE + 8;
}

/// First event of a block.
pub(super) const EVENTS: usize = 256;
/// Words of an event: time, first slot, and kind | slots << 8 | value << 32.
pub(super) const EVENT_WORDS: usize = 3;

const _: () = {
    assert!(STILL + still::WORDS <= EVENTS);
    assert!(HEAD_WORDS.is_multiple_of(PAGE_WORDS));
    assert!(head::COMMAND + head::COMMAND_WORDS == CORES);
};

/// Words of a block that holds 2^`log_events` events.
pub(super) const fn block_words(log_events: u32) -> usize {
    (EVENTS + EVENT_WORDS * (1 << log_events)).next_multiple_of(PAGE_WORDS)
}
