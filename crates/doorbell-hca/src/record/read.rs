//! Reading a flight record: of this process, of another one, of one that is dead.
//!
//! What is read was written by another process, perhaps while it went mad, and may change under the reader: lengths and numbers are
//! checked, counts are bounded, and of a ring only events that cannot have been overwritten meanwhile are believed.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use doorbell_device::layout::{CqKind, ErrorWord, NicHandler};
use doorbell_wire::Qpn;

use super::Kind;
use super::clock::{ClockKind, Scale};
use super::dir::{Identity, Life};
use super::layout::{self, block_words, firing, head, qp, region, rule, still};
use super::sane::Signs;
use super::waits::WaitRecord;
use crate::mem::Access;
use crate::qp::QpState;
use crate::script::{Firing, RuleState};

/// Why a file is no record.
#[derive(Debug, thiserror::Error)]
pub enum BadRecord {
    /// The system refused.
    #[error("reading the flight record {}: {source}", path.display())]
    Os {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is something else, or was not finished.
    #[error("{} is no flight record: {what}; remove it", path.display())]
    Nonsense {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Another release wrote it.
    #[error(
        "{} is a flight record of layout {theirs} and this release reads {}: use the release that wrote it",
        path.display(),
        layout::VERSION
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        theirs: u64,
    },
}

/// A flight record.
#[derive(Clone, Debug)]
pub struct Record {
    /// The process.
    pub pid: u32,
    /// Number by which peers know the HCA; 0 if it has none.
    pub id: u64,
    /// Rank in its job.
    pub rank: Option<u32>,
    /// Whoever waits runs the engine.
    pub caller_driven: bool,
    /// Release that wrote it.
    pub release: String,
    /// Command line of the process.
    pub command: String,
    /// When it was begun.
    pub begun_ns: u64,
    /// Engine cores.
    pub cores: Vec<CoreRecord>,
    /// Queue pairs, also some that are gone.
    pub qps: Vec<QpRecord>,
    /// Memory regions.
    pub regions: Vec<RegionRecord>,
    /// Waits under way.
    pub waits: Vec<WaitRecord>,
    /// What became of the rules of the fault script, as far as there was room; their words are cut short if they are many.
    pub rules: Vec<RuleState>,
    /// Firings of them: the first ones and the latest, oldest first.
    pub firings: Vec<Firing>,
    /// Regions and queue pairs that there was no room for.
    pub left_out: (u64, u64),
    signs: Signs,
    identity: Identity,
    /// Its times can be compared with those of now.
    of_this_boot: bool,
    scale: Scale,
    log_events: u32,
    blocks: usize,
}

/// An engine core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreRecord {
    /// Rounds so far.
    pub rounds: u64,
    /// When it last read the clock: not before its last work; a core that idles without sleeping reads it now and then.
    pub seen_ns: u64,
    /// Why it died, if it did.
    pub dead: Option<String>,
}

/// Where a queue pair's requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Target {
    /// Not connected.
    None = 0,
    /// A queue pair of the same HCA.
    Loopback = 1,
    /// Of another process of the host.
    Shm = 2,
    /// Over the network.
    Roce = 3,
    /// By an RDMA device.
    Verbs = 4,
}

impl Target {
    /// From a word of a record: the kind, and the number of the queue pair there.
    pub(crate) fn parse(word: u64) -> (Self, u32) {
        let kind = match word as u32 {
            1 => Self::Loopback,
            2 => Self::Shm,
            3 => Self::Roce,
            4 => Self::Verbs,
            _ => Self::None,
        };
        (kind, (word >> 32) as u32 & 0xff_ffff)
    }
}

/// What a queue pair is set aside for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Park {
    /// Nothing.
    None = 0,
    /// A WAIT that is not satisfied.
    Wait = 1,
    /// The slot was rung, and does not hold its WQE.
    Stale = 2,
    /// The target has no receive.
    Receive = 3,
    /// A long copy is done in slices.
    Slices = 4,
    /// Copies or messages before it are under way.
    Copies = 5,
    /// The target is not ready.
    Target = 6,
}

impl Park {
    /// From its number.
    pub const fn from_u32(n: u32) -> Self {
        match n {
            1 => Self::Wait,
            2 => Self::Stale,
            3 => Self::Receive,
            4 => Self::Slices,
            5 => Self::Copies,
            6 => Self::Target,
            _ => Self::None,
        }
    }

    /// In words.
    pub const fn text(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Wait => "a WAIT for another queue's completion",
            Self::Stale => "its slot, which was rung before it was written",
            Self::Receive => "a receive at its target",
            Self::Slices => "a long copy, which is done in slices",
            Self::Copies => "copies or messages under way",
            Self::Target => "its target, which is not connected",
        }
    }
}

/// A queue pair.
#[derive(Clone, Debug)]
pub struct QpRecord {
    /// QP number.
    pub qpn: u32,
    /// CQ number.
    pub cqn: u32,
    /// Engine core.
    pub core: u32,
    /// State; of a block that was given back, destroyed.
    pub state: QpState,
    /// Slots.
    pub depth: u32,
    /// Receives that its receive queue holds; 0 without one.
    pub receives: u32,
    /// How it is rung.
    pub handler: NicHandler,
    /// How its completions are written.
    pub cq: CqKind,
    /// Protection domain.
    pub pd: u32,
    /// Where its requests go, and the number of the queue pair there.
    pub target: (Target, u32),
    /// The first error.
    pub error: ErrorWord,
    /// Slots seen written, rung, executed, complete. The first is never below the second.
    pub posted: u64,
    /// See above.
    pub rung: u64,
    /// See above.
    pub executed: u64,
    /// See above.
    pub completed: u64,
    /// Addresses in its process: ring, CQ, record (0: none), doorbell word.
    pub addresses: [u64; 4],
    /// Address of the poster's structure in host memory; 0 if it is not known.
    pub poster: u64,
    /// What stood in its memory when the engine last looked.
    pub still: Option<Still>,
    /// The latest events, oldest first.
    pub events: Vec<Event>,
}

/// What stood in the memory of a queue pair, all at one moment.
#[derive(Clone, Debug)]
pub struct Still {
    /// When.
    pub at_ns: u64,
    /// When it was first seen like this: nothing has moved since.
    pub since_ns: u64,
    /// The doorbell record's bytes, as the number that a little-endian host loads.
    pub record: u32,
    /// The doorbell word.
    pub doorbell: u64,
    /// What it was set aside for.
    pub parked: Park,
    /// Reserved, ready, rung, consumed, if the poster's structure can be read by the host.
    pub poster: Option<[u64; 4]>,
    /// What device code waits for, a [`doorbell_device::layout::WaitNote`]'s first words.
    pub note: [u64; 6],
    /// The newest CQE.
    pub cqe: [u64; 8],
    /// One more than the newest slot that a collapsed CQ ought to show.
    pub newest: u64,
    /// The first slot whose CQE was not as the engine had written it, if one was found, and its words.
    pub lacks: Option<(u64, [u64; 8])>,
    /// The same of receives.
    pub recv_lacks: Option<(u64, [u64; 8])>,
    /// Receives posted and filled, if there is a queue of them.
    pub recv: Option<(u64, u64)>,
    /// Slots rung then.
    pub rung: u64,
    /// The first slots that were not complete, from this index on.
    pub first: u64,
    /// Their words.
    pub slots: Vec<[u64; 8]>,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, on the monotonic clock.
    pub at_ns: u64,
    /// What.
    pub kind: Kind,
    /// First slot.
    pub from: u64,
    /// Slots.
    pub slots: u32,
    /// See [`Kind`].
    pub value: u32,
}

impl Event {
    /// Does it say something of that slot?
    pub fn covers(&self, slot: u64) -> bool {
        slot.checked_sub(self.from)
            .is_some_and(|n| n < u64::from(self.slots))
    }
}

/// A memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRecord {
    /// Its key.
    pub key: u32,
    /// The address by which WQEs name its first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// The owner's address of its first byte.
    pub addr: u64,
    /// Rights.
    pub access: Access,
    /// Protection domain.
    pub pd: u32,
    /// GPU memory, which the CPU does not reach.
    pub on_gpu: bool,
}

/// Opens what is at a path, whatever it is, without waiting: for a FIFO's writer, for instance.
fn look(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
    File::options()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
}

/// The first words of a file, which say whose it is, if it is a record. (The head's tables behind them are two hundred times as long.)
pub(super) fn head_of(path: &Path) -> Option<Vec<u64>> {
    let file = look(path).ok()?;
    let words = words(&file, 0, layout::CORES).ok()?;
    let ok = words[head::MAGIC] == layout::MAGIC && words[head::COMPLETE] == 1;
    ok.then_some(words)
}

fn words(file: &File, at: usize, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    file.read_exact_at(&mut bytes, at as u64 * 8)?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok(words.iter().map(|w| u64::from_ne_bytes(*w)).collect())
}

impl Record {
    /// Reads the record of another process.
    ///
    /// # Errors
    /// [`BadRecord`].
    pub fn open(path: &Path) -> Result<Self, BadRecord> {
        let os = |source| BadRecord::Os {
            path: path.to_owned(),
            source,
        };
        let nonsense = |what: &str| BadRecord::Nonsense {
            path: path.to_owned(),
            what: what.to_owned(),
        };
        let file = look(path).map_err(os)?;
        let is = file.metadata().map_err(os)?;
        let uid = rustix::process::geteuid();
        if !is.is_file() || (is.uid() != uid.as_raw() && !uid.is_root()) {
            return Err(nonsense("it is not a file of this user"));
        }
        if is.len() < layout::HEAD_WORDS as u64 * 8 {
            return Err(nonsense("it is too short"));
        }
        let head = words(&file, 0, layout::HEAD_WORDS).map_err(os)?;
        let mut record = match Self::parse_head(&head) {
            Ok(record) => record,
            Err(Some(theirs)) => {
                return Err(BadRecord::Version {
                    path: path.to_owned(),
                    theirs,
                });
            }
            Err(None) => return Err(nonsense("it does not begin like one")),
        };
        let block = block_words(record.log_events);
        for number in 0..record.blocks {
            let from = layout::HEAD_WORDS + number * block;
            // A file that ends early, or was never that long, has no more.
            let Ok(copy) = words(&file, from, block) else {
                break;
            };
            let Ok(newest) = words(&file, from + qp::HEAD, 1) else {
                break;
            };
            record.add_block(&copy, newest[0]);
        }
        Ok(record)
    }

    /// `Err`: no record, or the version of one that is not ours.
    pub(super) fn parse_head(words: &[u64]) -> Result<Self, Option<u64>> {
        if words.len() < layout::HEAD_WORDS
            || words[head::MAGIC] != layout::MAGIC
            || words[head::COMPLETE] != 1
        {
            return Err(None);
        }
        if words[head::VERSION] != layout::VERSION {
            return Err(Some(words[head::VERSION]));
        }
        let kind = ClockKind::from_word(words[head::CLOCK]).ok_or(None)?;
        let scale = Scale::since(kind, words[head::TICKS], words[head::NS]);
        let log_events = u32::try_from(words[head::LOG_EVENTS])
            .ok()
            .filter(|l| (5..=20).contains(l))
            .ok_or(None)?;
        let cores = (words[head::CORES] as usize).min(layout::MAX_CORES);
        let identity = Identity::of(words);
        let firings = firings(words);
        Ok(Self {
            pid: identity.pid,
            id: words[head::ID],
            rank: (words[head::RANK] as u32).checked_sub(1),
            caller_driven: words[head::CALLER] == 1,
            release: text(&words[head::RELEASE..][..head::RELEASE_WORDS]),
            command: text(&words[head::COMMAND..][..head::COMMAND_WORDS]),
            begun_ns: words[head::NS],
            cores: (0..cores)
                .map(|i| {
                    let core = &words[layout::CORES + i * layout::CORE_WORDS..];
                    let dead = core[layout::core::DEAD] != 0;
                    CoreRecord {
                        rounds: core[layout::core::ROUNDS],
                        seen_ns: match core[layout::core::NOW] {
                            0 => 0,
                            ticks => scale.ns(ticks),
                        },
                        dead: dead.then(|| death(words, i)),
                    }
                })
                .collect(),
            qps: Vec::new(),
            regions: (0..layout::MAX_REGIONS)
                .filter_map(|i| region(&words[layout::REGIONS + i * layout::REGION_WORDS..]))
                .collect(),
            waits: (0..layout::MAX_WAITS)
                .filter_map(|i| {
                    let at = layout::WAITS + i * layout::WAIT_WORDS;
                    WaitRecord::parse(&words[at..at + layout::WAIT_WORDS], &scale)
                })
                .collect(),
            rules: rules(words, &firings),
            firings,
            left_out: (words[head::REGIONS_LEFT_OUT], words[head::QPS_LEFT_OUT]),
            signs: Signs::head(words),
            identity,
            of_this_boot: identity.is_of_this_boot(),
            scale,
            log_events,
            // Bounded by what a file can hold; one that is shorter ends the reading.
            blocks: words[head::BLOCKS].min(4096) as usize,
        })
    }

    /// Adds a queue pair from a copy of its block. `newest`: its count of events, read after the copy.
    pub(super) fn add_block(&mut self, block: &[u64], newest: u64) {
        let qp = qp_record(block, newest, self.log_events, &self.scale);
        let (cores, log) = (self.cores.len(), self.log_events);
        let life = self.of_this_boot.then(|| (self.begun_ns, super::now_ns()));
        self.signs.block(block, qp.as_ref(), cores, log, life);
        self.qps.extend(qp);
    }

    /// What shows that it is damaged, in words: nothing of what it says can be relied on then.
    pub fn damage(&self) -> Option<String> {
        self.signs.text()
    }

    /// What its process does now.
    pub fn life(&self) -> Life {
        self.identity.life(&Identity::here())
    }
}

fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .take_while(|b| *b != 0)
        .collect();
    // Of a terminal it makes nothing but letters.
    let letter = |c: char| match (c.is_whitespace(), c.is_control()) {
        (true, true) => ' ',
        (false, true) => char::REPLACEMENT_CHARACTER,
        _ => c,
    };
    String::from_utf8_lossy(&bytes)
        .chars()
        .map(letter)
        .collect()
}

/// Why a core died.
fn death(words: &[u64], core: usize) -> String {
    let known = (0..layout::MAX_DEATHS)
        .map(|i| &words[layout::DEATHS + i * layout::DEATH_WORDS..][..layout::DEATH_WORDS])
        .find(|death| death[0] == core as u64 + 1);
    known.map_or("it panicked".to_owned(), |death| text(&death[1..]))
}

/// The words of a rule, from 1.
fn rule_words(words: &[u64], number: usize) -> Option<&[u64]> {
    let i = number.checked_sub(1).filter(|i| *i < layout::MAX_RULES)?;
    Some(&words[layout::RULES + i * layout::RULE_WORDS..][..layout::RULE_WORDS])
}

fn rule_text(words: &[u64], number: usize) -> String {
    rule_words(words, number).map_or(String::new(), |w| text(&w[rule::TEXT..]))
}

fn rules(words: &[u64], firings: &[Firing]) -> Vec<RuleState> {
    let own = (words[head::RANK] as u32).saturating_sub(1);
    let count = (words[head::RULES] as usize).min(layout::MAX_RULES);
    (1..=count)
        .filter_map(|number| {
            let w = rule_words(words, number)?;
            let theirs = (w[rule::ELSEWHERE] as u32).checked_sub(1);
            Some(RuleState {
                rule: number,
                text: text(&w[rule::TEXT..]),
                elsewhere: theirs.map(|theirs| (theirs, own)),
                fired: w[rule::FIRED],
                first: firings.iter().find(|f| f.rule == number).cloned(),
            })
        })
        .collect()
}

fn firings(words: &[u64]) -> Vec<Firing> {
    let mut all: Vec<_> = (0..layout::MAX_FIRINGS)
        .map(|i| &words[layout::FIRINGS + i * layout::FIRING_WORDS..][..layout::FIRING_WORDS])
        .filter_map(|w| {
            let flags = w[firing::FLAGS];
            let rule = w[firing::RULE] as u32 as usize;
            let one = Firing {
                rule,
                text: rule_text(words, rule),
                action: crate::script::action_named((flags >> 8 & 0xff) as usize)?,
                core: (w[firing::RULE] >> 32) as usize,
                qpn: (w[firing::QPN] as u32).checked_sub(1).and_then(Qpn::new),
                index: w[firing::INDEX].checked_sub(1),
                receive: flags & firing::RECEIVE != 0,
                idle: flags & firing::IDLE != 0,
                at_ns: w[firing::AT],
                until_ns: Some(w[firing::UNTIL]).filter(|ns| *ns != 0),
                note: text(&w[firing::NOTE..]),
            };
            Some((w[firing::NUMBER].checked_sub(1)?, one))
        })
        .collect();
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, firing)| firing).collect()
}

fn region(words: &[u64]) -> Option<RegionRecord> {
    let key = u32::try_from(words[region::KEY].checked_sub(1)?).ok()?;
    let rights = words[region::RIGHTS];
    Some(RegionRecord {
        key,
        base: words[region::BASE],
        len: words[region::LEN],
        addr: words[region::ADDR],
        access: Access::from_bits((rights >> 32 & 0xff) as u32),
        pd: rights as u32,
        on_gpu: rights >> 40 & 0xff == 3,
    })
}

fn qp_record(block: &[u64], newest: u64, log_events: u32, scale: &Scale) -> Option<QpRecord> {
    if block.len() < block_words(log_events) || block[qp::NUMBERS] == 0 {
        return None;
    }
    let shape = block[qp::SHAPE];
    let log_depth = (shape & 0xff) as u32;
    let events = events(block, newest, log_events, scale);
    let done = events
        .last()
        .filter(|e| e.kind == Kind::Done)
        .map(|e| e.from.wrapping_add(e.slots.into()));
    let index = |at: usize| done.unwrap_or(block[at]);
    let (posted, rung) = (block[qp::POSTED], index(qp::RUNG));
    Some(QpRecord {
        qpn: block[qp::NUMBERS] as u32 & 0xff_ffff,
        cqn: (block[qp::NUMBERS] >> 32) as u32 & 0xff_ffff,
        core: block[qp::OWNER] as u32,
        state: QpState::from_u8(block[qp::STATE] as u8),
        depth: 1u32.checked_shl(log_depth).filter(|d| *d <= 1 << 15)?,
        receives: (shape >> 32 & 0xff)
            .checked_sub(1)
            .filter(|log| *log <= 15)
            .map_or(0, |log| 1 << log),
        handler: NicHandler::from_raw((shape >> 8 & 0xff) as i32),
        cq: CqKind::from_raw((shape >> 16) as u8),
        pd: block[qp::PD] as u32,
        target: Target::parse(block[qp::TARGET]),
        error: ErrorWord(block[qp::ERROR]),
        posted: posted.max(rung),
        rung,
        executed: index(qp::EXECUTED),
        completed: index(qp::COMPLETED),
        addresses: [
            block[qp::RING],
            block[qp::CQ],
            block[qp::RECORD],
            block[qp::DOORBELL],
        ],
        poster: block[qp::POSTER],
        still: still_record(&block[layout::STILL..], block[qp::POSTER] != 0, scale),
        events,
    })
}

fn still_record(words: &[u64], poster: bool, scale: &Scale) -> Option<Still> {
    let seq = words[still::SEQ];
    // 0: never taken; odd: it was being taken when it was copied, or when the process died.
    if seq == 0 || seq % 2 == 1 {
        return None;
    }
    let slots = (words[still::SLOTS] as usize).min(still::MAX_SLOTS);
    let eight = |at: usize| std::array::from_fn(|i| words[at + i]);
    let lacking = |number: usize, at: usize| Some((words[number].checked_sub(1)?, eight(at)));
    Some(Still {
        at_ns: scale.ns(words[still::AT]),
        since_ns: scale.ns(words[still::SINCE]),
        record: words[still::RECORD] as u32,
        doorbell: words[still::DOORBELL],
        parked: Park::from_u32(words[still::PARKED] as u32),
        poster: poster.then(|| std::array::from_fn(|i| words[still::POSTER + i])),
        note: std::array::from_fn(|i| words[still::NOTE + i]),
        cqe: eight(still::CQE),
        newest: words[still::NEWEST],
        lacks: lacking(still::LACKS, still::LACKS_CQE),
        recv_lacks: lacking(still::RECV_LACKS, still::RECV_LACKS_CQE),
        recv: words[still::RECV_POSTED]
            .checked_sub(1)
            .map(|posted| (posted, words[still::RECV_DONE])),
        rung: words[still::RUNG],
        first: words[still::FIRST],
        slots: (0..slots).map(|i| eight(still::RING + i * 8)).collect(),
    })
}

/// Events that were whole when they were copied: the count before the copy says which had been written, the count after it which
/// may have been overwritten meanwhile, the next one to come included.
fn events(block: &[u64], newest: u64, log_events: u32, scale: &Scale) -> Vec<Event> {
    let size = 1u64 << log_events;
    let written = block[qp::HEAD];
    if newest < written {
        // It was given to another queue pair meanwhile.
        return Vec::new();
    }
    let first = newest.saturating_sub(size - 1);
    (first..written)
        .filter_map(|number| {
            let at = layout::EVENTS + (number & (size - 1)) as usize * layout::EVENT_WORDS;
            let meta = block[at + 2];
            Some(Event {
                at_ns: scale.ns(block[at]),
                kind: Kind::from_u8(meta as u8)?,
                from: block[at + 1],
                slots: (meta >> 8 & 0xff_ffff) as u32,
                value: (meta >> 32) as u32,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn what_is_no_file_is_refused_without_waiting_for_it() {
        let path = std::env::temp_dir().join(format!("doorbell-fifo-{}", std::process::id()));
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        // Without a writer, an ordinary open would wait for ever.
        let head = head_of(&path);
        let error = Record::open(&path).expect_err("it is no record");
        let _ = std::fs::remove_file(&path);
        assert!(head.is_none());
        assert!(error.to_string().contains("not a file"), "{error}");
    }
}
