//! EFA: Amazon's adapter, whose queue pairs (SRD) are reliable but neither connected nor ordered.
//!
//! EFA has no RC. What it has besides UD is made by a library of its own, libefa, which is also rdma-core's driver for the device, and is
//! found at run time like libibverbs. [`Context::efa`] says whether a device is one and what it can do; [`SrdQp`] is a queue pair of it, an
//! [`Address`] names another port, and [`SrdQp::post`] takes remote reads and writes and short messages for whichever peer.
//!
//! Facts of this interface, from rdma-core's provider and the kernel's driver: every request must ask for its completion; a remote read or write has
//! one piece of local memory and a message two; a message is as long as a packet; only messages can be inline; there are no fences and no atomics; completions
//! come in any order; a failed request leaves the queue pair as it is; and the target of a remote read or write needs an address handle
//! of the side that asks. **None of it has been tested on the hardware**: no machine of ours has one.

pub mod abi;
mod queue;

use core::ffi::c_int;

pub use queue::{Address, SrdConfig, SrdOp, SrdQp, SrdWork, To};

use crate::abi::{AhAttr, RawAh, RawPd};
use crate::api::Verbs;
use crate::device::Context;
use crate::error::{Result, Step, VerbsError};

/// The library's name.
pub const LIBRARY: &str = "libefa.so.1";
/// The variable that names another one.
pub const VARIABLE: &str = "DOORBELL_LIBEFA";

/// Functions of libefa, and those of libibverbs that only address handles need. Tests make some of their own.
#[allow(missing_docs, reason = "each is the C function of that name")]
#[derive(Clone, Copy)]
pub struct EfaApi {
    pub query_device: abi::QueryDevice,
    pub create_qp_ex: abi::CreateQpEx,
    pub create_ah: unsafe extern "C" fn(*mut RawPd, *mut AhAttr) -> *mut RawAh,
    pub destroy_ah: unsafe extern "C" fn(*mut RawAh) -> c_int,
}

/// What an EFA device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EfaAttr {
    /// Requests of a queue.
    pub max_send: u32,
    /// Receives of a queue.
    pub max_recv: u32,
    /// Pieces of a message.
    pub send_pieces: u32,
    /// Pieces of a receive.
    pub recv_pieces: u32,
    /// Bytes of a remote read or write.
    pub max_rdma: u32,
    /// It reads remotely.
    pub reads: bool,
    /// It writes remotely.
    pub writes: bool,
    /// How often it repeats a message that found no receive can be said.
    pub rnr_retry: bool,
}

/// libefa as it was found.
pub(crate) struct Found {
    pub(crate) api: EfaApi,
    /// Keeps the functions mapped; tests have none.
    pub(crate) _library: Option<libloading::Library>,
}

impl Found {
    /// Looks for the library: [`LIBRARY`], or what [`VARIABLE`] names.
    ///
    /// # Errors
    /// What is missing, in words.
    ///
    /// # Safety
    /// `verbs` is libibverbs.
    pub(crate) unsafe fn load(verbs: &libloading::Library) -> Result<Self, String> {
        let path = std::env::var_os(VARIABLE).filter(|p| !p.is_empty());
        let file = path.as_deref().unwrap_or(LIBRARY.as_ref());
        let path = file.display();
        // SAFETY: loading libefa runs its constructor, which registers a driver and nothing else. Who names another library answers for it.
        let library = unsafe { libloading::Library::new(file) }
            .map_err(|e| format!("{path} cannot be loaded ({e})"))?;
        let missing = |symbol: &str| format!("{path} or libibverbs has no function {symbol}");
        macro_rules! find {
            ($from:expr, $symbol:literal) => {{
                // SAFETY: the functions of that name have had these signatures in every release.
                let found = unsafe { $from.get(concat!($symbol, "\0").as_bytes()) };
                *found.map_err(|_| missing($symbol))?
            }};
        }
        let api = EfaApi {
            query_device: find!(library, "efadv_query_device"),
            create_qp_ex: find!(library, "efadv_create_qp_ex"),
            create_ah: find!(verbs, "ibv_create_ah"),
            destroy_ah: find!(verbs, "ibv_destroy_ah"),
        };
        Ok(Self {
            api,
            _library: Some(library),
        })
    }
}

impl Verbs {
    /// libefa's functions, for a device of `name`.
    fn efa_api(&self, name: &str) -> Result<&EfaApi> {
        match self.efa_found() {
            Ok(found) => Ok(&found.api),
            Err(reason) => Err(VerbsError::Unsupported {
                device: name.to_owned(),
                what: format!(
                    "it is an EFA device, and {reason}: install libefa of rdma-core 46 or later (Debian: ibverbs-providers, package libefa1 elsewhere), or name it with {VARIABLE}"
                ),
            }),
        }
    }
}

impl Context {
    pub(crate) fn efa_api(&self) -> Result<&EfaApi> {
        self.verbs().efa_api(self.name())
    }

    /// What it can do if it is an EFA device; `None` if it is another.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] without libefa, [`VerbsError::Step`].
    pub fn efa(&self) -> Result<Option<EfaAttr>> {
        if self.attributes()?.vendor != abi::VENDOR {
            return Ok(None);
        }
        let mut raw = abi::RawEfaAttr::default();
        let size = size_of::<abi::RawEfaAttr>() as u32;
        // SAFETY: the context is open; as many bytes are written as there are.
        match unsafe { (self.efa_api()?.query_device)(self.raw(), &mut raw, size) } {
            0 => {}
            // Amazon has other adapters.
            libc::EOPNOTSUPP => return Ok(None),
            e => return Err(self.refused(Step::Query, "as an EFA device", e.abs())),
        }
        let has = |cap| raw.device_caps & cap != 0;
        Ok(Some(EfaAttr {
            max_send: raw.max_sq_wr,
            max_recv: raw.max_rq_wr,
            send_pieces: raw.max_sq_sge.into(),
            recv_pieces: raw.max_rq_sge.into(),
            max_rdma: raw.max_rdma_size,
            reads: has(abi::caps::RDMA_READ),
            writes: has(abi::caps::RDMA_WRITE),
            rnr_retry: has(abi::caps::RNR_RETRY),
        }))
    }
}
