//! Work requests: several of one queue pair, given to the device together.
//!
//! Devices have one of two ways: a list of structures (`ibv_post_send`), or calls that build each request in the device's own queue
//! (`ibv_wr_*`). A [`Batch`] takes requests in one form and uses whichever its queue pair has. The list is kept from batch to batch, linked and with
//! room for the usual request's one piece or few bytes, so that a request costs the words that differ.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use crate::abi::*;
use crate::queue::Qp;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Local memory, or inline bytes, to `addr`.
    Write {
        /// The peer's address.
        addr: u64,
        /// The peer's key.
        rkey: u32,
        /// The immediate, in host order.
        imm: Option<u32>,
    },
    /// From `addr` to local memory.
    Read {
        /// The peer's address.
        addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// To the peer's next receive.
    Send {
        /// The immediate, in host order.
        imm: Option<u32>,
    },
    /// Adds; the old value comes to local memory.
    FetchAdd {
        /// The peer's address.
        addr: u64,
        /// The peer's key.
        rkey: u32,
        /// What to add.
        add: u64,
    },
    /// Swaps if equal; the old value comes to local memory.
    CompareSwap {
        /// The peer's address.
        addr: u64,
        /// The peer's key.
        rkey: u32,
        /// What it must be.
        compare: u64,
        /// What it becomes.
        swap: u64,
    },
}

impl Op {
    /// The part of a long message for its bytes from `from` on. The immediate goes with the last part.
    #[must_use]
    pub fn part(self, from: u64, last: bool) -> Self {
        match self {
            Self::Write { addr, rkey, imm } => Self::Write {
                addr: addr.wrapping_add(from),
                rkey,
                imm: imm.filter(|_| last),
            },
            Self::Read { addr, rkey } => Self::Read {
                addr: addr.wrapping_add(from),
                rkey,
            },
            whole @ (Self::Send { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. }) => whole,
        }
    }

    /// Is local memory written, rather than read?
    #[must_use]
    pub fn writes_here(self) -> bool {
        match self {
            Self::Read { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. } => true,
            Self::Write { .. } | Self::Send { .. } => false,
        }
    }
}

/// Where the bytes are.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Pieces of registered memory; may be none.
    Pieces(&'a [Sge]),
    /// Bytes that are copied at once.
    Inline(&'a [u8]),
}

/// One work request.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// What its completion says.
    pub id: u64,
    /// [`send_flags`]; [`send_flags::INLINE`] is set by itself.
    pub flags: u32,
    /// What to do.
    pub op: Op,
    /// With which bytes.
    pub data: Data<'a>,
}

/// The device took only part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// So many were taken.
    pub taken: usize,
    /// What it said of the next, as `errno`.
    pub errno: i32,
}

/// The calls of a queue pair that has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Calls {
    qp: NonNull<RawQpEx>,
    compare_swap: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64, u64, u64)>,
    fetch_add: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64, u64)>,
    read: unsafe extern "C" fn(*mut RawQpEx, u32, u64),
    write: unsafe extern "C" fn(*mut RawQpEx, u32, u64),
    write_imm: unsafe extern "C" fn(*mut RawQpEx, u32, u64, u32),
    send: unsafe extern "C" fn(*mut RawQpEx),
    send_imm: unsafe extern "C" fn(*mut RawQpEx, u32),
    set_inline: unsafe extern "C" fn(*mut RawQpEx, *mut c_void, usize),
    set_sge: unsafe extern "C" fn(*mut RawQpEx, u32, u64, u32),
    set_sge_list: unsafe extern "C" fn(*mut RawQpEx, usize, *const Sge),
    start: unsafe extern "C" fn(*mut RawQpEx),
    complete: unsafe extern "C" fn(*mut RawQpEx) -> c_int,
}

// SAFETY: they lead to a queue pair, which libibverbs lets any thread use.
unsafe impl Send for Calls {}
// SAFETY: as above.
unsafe impl Sync for Calls {}

impl Calls {
    /// Those of an extended queue pair; `None` if one that is always needed is missing.
    ///
    /// # Safety
    /// `qp` is null or an extended queue pair.
    pub(crate) unsafe fn of(qp: *mut RawQpEx) -> Option<Self> {
        let qp = NonNull::new(qp)?;
        let raw = qp.as_ptr();
        // SAFETY: the caller's promise. Field by field: nothing is assumed about what lies behind those.
        unsafe {
            Some(Self {
                qp,
                compare_swap: (*raw).compare_swap,
                fetch_add: (*raw).fetch_add,
                read: (*raw).read?,
                write: (*raw).write?,
                write_imm: (*raw).write_imm?,
                send: (*raw).send?,
                send_imm: (*raw).send_imm?,
                set_inline: (*raw).set_inline?,
                set_sge: (*raw).set_sge?,
                set_sge_list: (*raw).set_sge_list?,
                start: (*raw).start?,
                complete: (*raw).complete?,
            })
        }
    }
}

/// Inline bytes that have room in the list itself.
const SMALL: usize = 48;
/// The list grows by so many requests.
const MORE: usize = 32;

/// A request of the list. Its pointers are set when the list grows, and lead to its own piece and to the next entry.
#[repr(C)]
struct Entry {
    wr: SendWr,
    one: Sge,
    small: [u8; SMALL],
}

/// Several pieces, or long inline data: they lie in vectors that may still move, so their places are made addresses when the batch is submitted.
#[derive(Clone, Copy, Debug)]
enum Late {
    Pieces { entry: usize, at: usize },
    Inline { entry: usize, at: usize },
}

/// Requests on their way to the device.
#[derive(Default)]
pub struct Batch {
    list: Vec<Entry>,
    /// Entries in use.
    listed: usize,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    late: Vec<Late>,
    /// Requests given by calls since the first.
    called: usize,
}

// SAFETY: the pointers in the list lead into it.
unsafe impl Send for Batch {}

impl core::fmt::Debug for Batch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Batch({} requests)", self.len())
    }
}

impl Batch {
    /// How many requests wait for [`Batch::submit`].
    #[inline]
    pub fn len(&self) -> usize {
        self.listed + self.called
    }

    /// Are there none?
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a request. `false`: the queue pair has no such operation, and nothing was added.
    ///
    /// # Safety
    /// All requests of a batch are of one queue pair, from the first to [`Batch::submit`], during which nobody else posts to it. The pieces may be
    /// used until the request completes or the queue pair is reset or destroyed.
    #[inline(always)]
    pub unsafe fn push(&mut self, qp: &Qp, work: &Work<'_>) -> bool {
        match &qp.calls {
            // SAFETY: the caller's promise.
            Some(calls) => unsafe { self.call(calls, work) },
            None => {
                self.list(work);
                true
            }
        }
    }

    /// # Safety
    /// As for [`Batch::push`].
    #[inline(always)]
    unsafe fn call(&mut self, calls: &Calls, work: &Work<'_>) -> bool {
        let qp = calls.qp.as_ptr();
        let missing = match work.op {
            Op::FetchAdd { .. } => calls.fetch_add.is_none(),
            Op::CompareSwap { .. } => calls.compare_swap.is_none(),
            _ => false,
        };
        if missing {
            return false;
        }
        // SAFETY: the queue pair lives, and these are its functions; inline bytes and pieces are copied by the calls.
        unsafe {
            if self.called == 0 {
                (calls.start)(qp);
            }
            self.called += 1;
            (*qp).wr_id = work.id;
            // soft-RoCE's kernel side looks for inline data only where this flag is; others set it themselves.
            (*qp).wr_flags = match work.data {
                Data::Inline(_) => work.flags | send_flags::INLINE,
                Data::Pieces(_) => work.flags,
            };
            match work.op {
                Op::Write { addr, rkey, imm } => match imm {
                    None => (calls.write)(qp, rkey, addr),
                    Some(imm) => (calls.write_imm)(qp, rkey, addr, imm.to_be()),
                },
                Op::Read { addr, rkey } => (calls.read)(qp, rkey, addr),
                Op::Send { imm: None } => (calls.send)(qp),
                Op::Send { imm: Some(imm) } => (calls.send_imm)(qp, imm.to_be()),
                Op::FetchAdd { addr, rkey, add } => {
                    if let Some(f) = calls.fetch_add {
                        f(qp, rkey, addr, add);
                    }
                }
                Op::CompareSwap {
                    addr,
                    rkey,
                    compare,
                    swap,
                } => {
                    if let Some(f) = calls.compare_swap {
                        f(qp, rkey, addr, compare, swap);
                    }
                }
            }
            match work.data {
                Data::Pieces([one]) => (calls.set_sge)(qp, one.lkey, one.addr, one.length),
                Data::Pieces(many) => (calls.set_sge_list)(qp, many.len(), many.as_ptr()),
                Data::Inline(bytes) => {
                    (calls.set_inline)(qp, bytes.as_ptr().cast_mut().cast(), bytes.len());
                }
            }
        }
        true
    }

    #[inline(always)]
    fn list(&mut self, work: &Work<'_>) {
        if self.listed == self.list.len() {
            self.grow();
        }
        let entry = self.listed;
        // SAFETY: the list has more entries than are in use. They are only ever reached by pointers that come from the vector, as the device does.
        let (wr, one, small) = unsafe {
            let at = self.list.as_mut_ptr().add(entry);
            (
                &mut (*at).wr,
                &mut (*at).one,
                (&raw mut (*at).small).cast::<u8>(),
            )
        };
        let mut flags = work.flags;
        wr.wr_id = work.id;
        match work.op {
            Op::Write { addr, rkey, imm } => {
                wr.opcode = match imm {
                    None => wr_opcode::WRITE,
                    Some(_) => wr_opcode::WRITE_IMM,
                };
                wr.imm = imm.unwrap_or(0).to_be();
                (wr.target[0], wr.target[1]) = (addr, rkey.into());
            }
            Op::Read { addr, rkey } => {
                wr.opcode = wr_opcode::READ;
                (wr.target[0], wr.target[1]) = (addr, rkey.into());
            }
            Op::Send { imm } => {
                wr.opcode = match imm {
                    None => wr_opcode::SEND,
                    Some(_) => wr_opcode::SEND_IMM,
                };
                wr.imm = imm.unwrap_or(0).to_be();
            }
            Op::FetchAdd { addr, rkey, add } => {
                wr.opcode = wr_opcode::FETCH_ADD;
                wr.target = [addr, add, 0, rkey.into()];
            }
            Op::CompareSwap {
                addr,
                rkey,
                compare,
                swap,
            } => {
                wr.opcode = wr_opcode::COMPARE_SWAP;
                wr.target = [addr, compare, swap, rkey.into()];
            }
        }
        wr.num_sge = 1;
        match work.data {
            Data::Pieces([piece]) => *one = *piece,
            Data::Pieces(many) => {
                wr.num_sge = many.len() as c_int;
                let at = self.sges.len();
                self.sges.extend_from_slice(many);
                self.late.push(Late::Pieces { entry, at });
            }
            Data::Inline([]) => wr.num_sge = 0,
            Data::Inline(bytes) => {
                flags |= send_flags::INLINE;
                one.length = bytes.len() as u32;
                if bytes.len() <= SMALL {
                    // SAFETY: it has room for them.
                    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), small, bytes.len()) };
                    one.addr = small.expose_provenance() as u64;
                } else {
                    let at = self.inline.len();
                    self.inline.extend_from_slice(bytes);
                    self.late.push(Late::Inline { entry, at });
                }
            }
        }
        wr.send_flags = flags;
        self.listed += 1;
    }

    /// More entries, and all linked anew: they may have moved.
    #[cold]
    fn grow(&mut self) {
        let old = self.list.as_ptr();
        for _ in 0..MORE {
            self.list.push(Entry {
                wr: SendWr::EMPTY,
                one: Sge::default(),
                small: [0; SMALL],
            });
        }
        let first = self.list.as_mut_ptr();
        let moved = old != first;
        for i in 0..self.list.len() {
            // SAFETY: an entry of the list.
            unsafe {
                let at = first.add(i);
                (*at).wr.sg_list = &raw mut (*at).one;
                (*at).wr.next = match i + 1 < self.list.len() {
                    true => &raw mut (*first.add(i + 1)).wr,
                    false => core::ptr::null_mut(),
                };
                // Inline bytes of those in use have moved with it.
                let inline = (*at).wr.send_flags & send_flags::INLINE != 0;
                if moved && i < self.listed && inline && (*at).one.length as usize <= SMALL {
                    (*at).one.addr = (&raw mut (*at).small).expose_provenance() as u64;
                }
            }
        }
    }

    /// Gives everything to the device. The batch is empty afterwards.
    ///
    /// # Errors
    /// [`Refused`]: what it took first it carries out.
    ///
    /// # Safety
    /// As for [`Batch::push`].
    #[inline]
    pub unsafe fn submit(&mut self, qp: &Qp) -> Result<(), Refused> {
        if let Some(calls) = &qp.calls {
            if std::mem::take(&mut self.called) == 0 {
                return Ok(());
            }
            // SAFETY: started by the first `push`; these are the queue pair's functions.
            return match unsafe { (calls.complete)(calls.qp.as_ptr()) } {
                0 => Ok(()),
                errno => Err(Refused {
                    taken: 0,
                    errno: errno.abs(),
                }),
            };
        }
        let count = std::mem::take(&mut self.listed);
        if count == 0 {
            return Ok(());
        }
        let list = self.list.as_mut_ptr();
        for late in &self.late {
            // SAFETY: entries of the list, and places in the vectors.
            unsafe {
                match *late {
                    Late::Pieces { entry, at } => {
                        (*list.add(entry)).wr.sg_list = self.sges.as_mut_ptr().add(at);
                    }
                    Late::Inline { entry, at } => {
                        let bytes = self.inline.as_ptr().add(at);
                        (*list.add(entry)).one.addr = bytes.expose_provenance() as u64;
                    }
                }
            }
        }
        let mut bad: *mut SendWr = core::ptr::null_mut();
        // SAFETY: the queue pair lives; the list and what it points to live during the call, which copies them. It ends behind the last in use.
        let rc = unsafe {
            let last = &raw mut (*list.add(count - 1)).wr.next;
            let next = last.replace(core::ptr::null_mut());
            let rc = (qp.post_send)(qp.raw(), &raw mut (*list).wr, &mut bad);
            *last = next;
            rc
        };
        let done = match rc {
            0 => Ok(()),
            rc => {
                let errno = if rc < 0 { crate::error::errno() } else { rc };
                // A provider that names no request, or a strange one, took none that we know of.
                let named = |i: &usize| list.wrapping_add(*i).cast() == bad;
                Err(Refused {
                    taken: (0..count).find(named).unwrap_or(0),
                    errno,
                })
            }
        };
        for late in self.late.drain(..) {
            if let Late::Pieces { entry, .. } = late {
                // SAFETY: an entry of the list.
                unsafe { (*list.add(entry)).wr.sg_list = &raw mut (*list.add(entry)).one };
            }
        }
        self.sges.clear();
        self.inline.clear();
        done
    }
}
