//! What queue pairs of every kind have in common: a number, states, receives and an end.

use core::ffi::c_int;
use core::ptr::NonNull;

use crate::abi::*;
use crate::device::Context;
use crate::error::{Result, Step, errno};
use crate::memory::Pd;
use crate::queue::Cq;

/// A queue pair of whichever kind. Dropping it destroys it.
#[derive(Debug)]
pub struct AnyQp {
    raw: NonNull<RawQp>,
    post_recv: PostRecv,
    pd: Pd,
    _cqs: [Cq; 2],
}

// SAFETY: libibverbs lets any thread use a queue pair.
unsafe impl Send for AnyQp {}
// SAFETY: as above.
unsafe impl Sync for AnyQp {}

impl AnyQp {
    /// Takes a queue pair of `pd` that nobody else destroys. `cqs`: for what it sends, and what it receives.
    pub(crate) fn new(raw: NonNull<RawQp>, post_recv: PostRecv, pd: &Pd, cqs: [&Cq; 2]) -> Self {
        Self {
            raw,
            post_recv,
            pd: pd.clone(),
            _cqs: cqs.map(Cq::clone),
        }
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        // SAFETY: the queue pair lives; its number does not change.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// Its device.
    pub fn context(&self) -> &Context {
        self.pd.context()
    }

    pub(crate) fn raw(&self) -> *mut RawQp {
        self.raw.as_ptr()
    }

    pub(crate) fn modify(
        &self,
        step: Step,
        what: &str,
        attr: &mut QpAttr,
        mask: c_int,
    ) -> Result<()> {
        // SAFETY: the queue pair lives.
        match unsafe { (self.context().api().modify_qp)(self.raw(), attr, mask) } {
            0 => Ok(()),
            // Some providers answer -1 and leave the rest in errno.
            e if e < 0 => Err(self.context().refused(step, what, errno())),
            e => Err(self.context().refused(step, what, e)),
        }
    }

    /// Any state to ERR: what is under way is flushed.
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn fail(&self) -> Result<()> {
        let mut attr = QpAttr {
            qp_state: qp_state::ERR,
            ..QpAttr::default()
        };
        self.modify(Step::Modify, "to ERR", &mut attr, qp_mask::STATE)
    }

    /// Any state to RESET: nothing is under way any more, and no completion comes of it.
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn reset(&self) -> Result<()> {
        let mut attr = QpAttr::default();
        self.modify(Step::Modify, "to RESET", &mut attr, qp_mask::STATE)
    }

    /// Its state as the device has it ([`qp_state`]).
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn state(&self) -> Result<u32> {
        let mut attr = QpAttr::default();
        // SAFETY: all-zero bytes are a valid value of a structure of numbers and null pointers.
        let mut init: QpInitAttr = unsafe { core::mem::zeroed() };
        let query = self.context().api().query_qp;
        // SAFETY: the queue pair lives; both structures are written.
        match unsafe { query(self.raw(), &mut attr, qp_mask::STATE, &mut init) } {
            0 => Ok(attr.qp_state),
            e => Err(self.context().refused(Step::Query, "a queue pair", e)),
        }
    }

    /// Does the device say that it has stopped?
    pub fn is_broken(&self) -> bool {
        matches!(self.state(), Ok(qp_state::ERR | qp_state::SQE))
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// What the device said, as `errno`.
    ///
    /// # Safety
    /// The pieces may be written until the receive completes or the queue pair is reset or destroyed.
    pub unsafe fn post_recv(&self, id: u64, pieces: &mut [Sge]) -> Result<(), i32> {
        let mut wr = RecvWr {
            wr_id: id,
            next: core::ptr::null_mut(),
            sg_list: pieces.as_mut_ptr(),
            num_sge: pieces.len() as c_int,
        };
        let mut bad = core::ptr::null_mut();
        // SAFETY: the queue pair lives; request and pieces are read during the call only.
        match unsafe { (self.post_recv)(self.raw(), &mut wr, &mut bad) } {
            0 => Ok(()),
            e if e < 0 => Err(errno()),
            e => Err(e),
        }
    }
}

impl Drop for AnyQp {
    fn drop(&mut self) {
        let context = self.pd.context();
        // SAFETY: nobody else has the handle.
        let rc = unsafe { (context.api().destroy_qp)(self.raw.as_ptr()) };
        context.taken_down("destroying a queue pair", rc);
    }
}
