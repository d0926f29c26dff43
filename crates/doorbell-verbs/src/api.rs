//! Finding the library and its functions.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::abi::*;
use crate::efa::{EfaApi, Found};
use crate::error::{Result, VerbsError};

/// The library's name.
pub const LIBRARY: &str = "libibverbs.so.1";
/// The variable that names another one.
pub const VARIABLE: &str = "DOORBELL_IBVERBS";

macro_rules! api {
    (
        needed { $($(#[$doc:meta])* $name:ident = $symbol:literal: fn($($arg:ty),*) $(-> $ret:ty)?;)* }
        optional { $($(#[$odoc:meta])* $oname:ident = $osymbol:literal: fn($($oarg:ty),*) $(-> $oret:ty)?;)* }
    ) => {
        /// The functions of the library. Tests make one of their own.
        #[allow(missing_docs, reason = "each is the C function of that name")]
        #[derive(Clone, Copy)]
        pub struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
        }

        impl Api {
            /// # Safety
            /// The library is libibverbs: its functions have these signatures.
            unsafe fn find(library: &libloading::Library, path: &str) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the caller's promise.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>(concat!($symbol, "\0").as_bytes()) };
                        *found.map_err(|_| VerbsError::Symbol { path: path.to_owned(), symbol: $symbol })?
                    },)*
                    $($oname: {
                        // SAFETY: the caller's promise.
                        unsafe { library.get::<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(concat!($osymbol, "\0").as_bytes()) }.ok().map(|f| *f)
                    },)*
                })
            }
        }
    };
}

api! {
    needed {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut RawDevice;
    free_device_list = "ibv_free_device_list": fn(*mut *mut RawDevice);
    open_device = "ibv_open_device": fn(*mut RawDevice) -> *mut RawContext;
    close_device = "ibv_close_device": fn(*mut RawContext) -> c_int;
    query_device = "ibv_query_device": fn(*mut RawContext, *mut RawDeviceAttr) -> c_int;
    query_port = "ibv_query_port": fn(*mut RawContext, u8, *mut RawPortAttr) -> c_int;
    query_gid = "ibv_query_gid": fn(*mut RawContext, u8, c_int, *mut Gid) -> c_int;
    alloc_pd = "ibv_alloc_pd": fn(*mut RawContext) -> *mut RawPd;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut RawPd) -> c_int;
    reg_mr = "ibv_reg_mr": fn(*mut RawPd, *mut c_void, usize, c_int) -> *mut RawMr;
    dereg_mr = "ibv_dereg_mr": fn(*mut RawMr) -> c_int;
    create_cq = "ibv_create_cq": fn(*mut RawContext, c_int, *mut c_void, *mut c_void, c_int) -> *mut RawCq;
    destroy_cq = "ibv_destroy_cq": fn(*mut RawCq) -> c_int;
    create_qp = "ibv_create_qp": fn(*mut RawPd, *mut QpInitAttr) -> *mut RawQp;
    modify_qp = "ibv_modify_qp": fn(*mut RawQp, *mut QpAttr, c_int) -> c_int;
    query_qp = "ibv_query_qp": fn(*mut RawQp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut RawQp) -> c_int;
    get_async_event = "ibv_get_async_event": fn(*mut RawContext, *mut RawAsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event": fn(*mut RawAsyncEvent);
    wc_status_str = "ibv_wc_status_str": fn(u32) -> *const c_char;
    }
    optional {
    reg_mr_iova2 = "ibv_reg_mr_iova2": fn(*mut RawPd, *mut c_void, usize, u64, c_uint) -> *mut RawMr;
    /// rdma-core 34 and later.
    reg_dmabuf_mr = "ibv_reg_dmabuf_mr": fn(*mut RawPd, u64, usize, u64, c_int, c_int) -> *mut RawMr;
    query_gid_ex = "_ibv_query_gid_ex": fn(*mut RawContext, u32, u32, *mut RawGidEntry, u32, usize) -> c_int;
    qp_to_qp_ex = "ibv_qp_to_qp_ex": fn(*mut RawQp) -> *mut RawQpEx;
    }
}

/// `ibv_reg_dmabuf_mr`.
pub type DmabufMr = unsafe extern "C" fn(*mut RawPd, u64, usize, u64, c_int, c_int) -> *mut RawMr;

/// The library; a cheap handle.
#[derive(Clone)]
pub struct Verbs(Arc<Loaded>);

struct Loaded {
    api: Api,
    path: String,
    /// libefa, looked for when there is a device that needs it.
    efa: OnceLock<Result<Found, String>>,
    /// Keeps the functions mapped.
    library: Option<libloading::Library>,
}

impl core::fmt::Debug for Verbs {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Verbs({})", self.0.path)
    }
}

impl Verbs {
    /// Loads [`LIBRARY`], or what [`VARIABLE`] names.
    ///
    /// # Errors
    /// [`VerbsError::NoLibrary`], [`VerbsError::Symbol`].
    pub fn load() -> Result<Self> {
        let path = std::env::var_os(VARIABLE).filter(|p| !p.is_empty());
        Self::load_from(path.as_deref().unwrap_or(LIBRARY.as_ref()))
    }

    /// Loads the library of that name or path.
    ///
    /// # Errors
    /// As for [`Verbs::load`].
    pub fn load_from(path: impl AsRef<std::ffi::OsStr>) -> Result<Self> {
        let (file, path) = (path.as_ref(), path.as_ref().display().to_string());
        // SAFETY: loading rdma-core runs its constructors, which register providers and nothing else. Who names another library
        // answers for it.
        let library =
            unsafe { libloading::Library::new(file) }.map_err(|e| VerbsError::NoLibrary {
                path: path.clone(),
                reason: e.to_string(),
            })?;
        // SAFETY: the functions of libibverbs have had these signatures in every release.
        let api = unsafe { Api::find(&library, &path)? };
        Ok(Self(Arc::new(Loaded {
            api,
            path,
            efa: OnceLock::new(),
            library: Some(library),
        })))
    }

    /// Functions from elsewhere, for tests.
    ///
    /// # Safety
    /// They behave as those of libibverbs.
    pub unsafe fn with_api(name: &str, api: Api) -> Self {
        Self(Arc::new(Loaded {
            api,
            path: name.to_owned(),
            efa: OnceLock::new(),
            library: None,
        }))
    }

    /// As [`Verbs::with_api`], with libefa beside it.
    ///
    /// # Safety
    /// As for [`Verbs::with_api`], and the second as those of libefa.
    pub unsafe fn with_efa(name: &str, api: Api, efa: EfaApi) -> Self {
        // SAFETY: the caller's promise.
        let verbs = unsafe { Self::with_api(name, api) };
        let found = Found {
            api: efa,
            _library: None,
        };
        let _ = verbs.0.efa.set(Ok(found));
        verbs
    }

    /// libefa, or why it is not there.
    pub(crate) fn efa_found(&self) -> Result<&Found, &str> {
        let found = self.0.efa.get_or_init(|| match &self.0.library {
            // SAFETY: the library is libibverbs.
            Some(verbs) => unsafe { Found::load(verbs) },
            None => Err("no libefa was given".to_owned()),
        });
        found.as_ref().map_err(String::as_str)
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// The file that it is, links followed.
    pub fn file(&self) -> Option<PathBuf> {
        // SAFETY: all-zero bytes are a valid value of a structure of pointers.
        let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
        let function = self.api().get_device_list as *const c_void;
        // SAFETY: the structure is written; any address may be asked for.
        if unsafe { libc::dladdr(function, &mut found) } == 0 || found.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the name lives as long as the library is loaded.
        let name = unsafe { core::ffi::CStr::from_ptr(found.dli_fname) };
        let name = std::ffi::OsStr::from_bytes(name.to_bytes());
        std::fs::canonicalize(name).ok()
    }

    /// The release of rdma-core, as far as the name of its file says it.
    pub fn release(&self) -> Option<String> {
        release(self.file()?.file_name()?.to_str()?)
    }

    /// Its functions.
    pub fn api(&self) -> &Api {
        &self.0.api
    }

    /// What a completion's status means, in the library's words.
    pub fn status_words(&self, status: u32) -> String {
        // SAFETY: the function takes any number and returns a string that lives for ever, or nothing.
        let text = unsafe { (self.api().wc_status_str)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above.
        unsafe { core::ffi::CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// rdma-core's library is called after the interface and the release: `libibverbs.so.1.14.44.0` is of 44.0.
fn release(file: &str) -> Option<String> {
    let mut numbers = file.strip_prefix("libibverbs.so.1.")?.split('.').skip(1);
    let (major, minor): (u32, u32) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    Some(format!("{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_s_file_says_its_release() {
        let of = |file| release(file).unwrap_or_else(|| "unknown".to_owned());
        assert_eq!(of("libibverbs.so.1.14.44.0"), "44.0");
        assert_eq!(of("libibverbs.so.1.15.56.1"), "56.1");
        for other in [
            "libibverbs.so.1",
            "libmock_rdma.so",
            "libibverbs.so.1.14.x.0",
        ] {
            assert_eq!(of(other), "unknown");
        }
    }
}
