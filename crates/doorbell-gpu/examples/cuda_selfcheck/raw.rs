//! A few driver calls made directly, as another library in the process would make them.

use std::ffi::{c_int, c_uint, c_void};

use libloading::Library;

/// The library, with the primary context of device 0 or `DOORBELL_GPU`'s current on this thread.
pub(crate) struct Raw {
    library: Library,
    device: c_int,
    pub(crate) context: *mut c_void,
}

type Failure = Box<dyn std::error::Error>;

/// Calls a driver function by its exported name and signature.
macro_rules! cu {
    ($raw:expr, $name:ident($($ty:ty),*)($($arg:expr),*)) => {{
        // SAFETY: the signature is cuda.h's; arguments are good for the call's time.
        let code = unsafe {
            let f = $raw.get::<unsafe extern "C" fn($($ty),*) -> c_int>(stringify!($name))?;
            f($($arg),*)
        };
        if code == 0 { Ok::<(), Box<dyn std::error::Error>>(()) } else { Err(format!("{} gave {code}", stringify!($name)).into()) }
    }};
}
pub(crate) use cu;

impl Raw {
    pub(crate) fn open(ordinal: u32) -> Result<Self, Failure> {
        // SAFETY: the driver library, loaded already.
        let library = unsafe { Library::new("libcuda.so.1") }?;
        let mut raw = Self {
            library,
            device: 0,
            context: std::ptr::null_mut(),
        };
        let mut device = 0;
        cu!(raw, cuDeviceGet(*mut c_int, c_int)(&mut device, ordinal as c_int))?;
        let mut context = std::ptr::null_mut();
        cu!(raw, cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int)(&mut context, device))?;
        cu!(raw, cuCtxSetCurrent(*mut c_void)(context))?;
        (raw.device, raw.context) = (device, context);
        Ok(raw)
    }

    /// # Safety
    /// `T` is the function's type.
    pub(crate) unsafe fn get<T: Copy>(&self, name: &str) -> Result<T, Failure> {
        // SAFETY: the caller's promise.
        Ok(*unsafe { self.library.get::<T>(name.as_bytes()) }?)
    }

    pub(crate) fn current(&self) -> Result<*mut c_void, Failure> {
        let mut context = std::ptr::null_mut();
        cu!(self, cuCtxGetCurrent(*mut *mut c_void)(&mut context))?;
        Ok(context)
    }

    pub(crate) fn stream(&self) -> Result<*mut c_void, Failure> {
        let mut stream = std::ptr::null_mut();
        cu!(self, cuStreamCreate(*mut *mut c_void, c_uint)(&mut stream, 1))?;
        Ok(stream)
    }

    pub(crate) fn synchronize(&self, stream: *mut c_void) -> Result<(), Failure> {
        cu!(self, cuStreamSynchronize(*mut c_void)(stream))
    }

    pub(crate) fn destroy(&self, stream: *mut c_void) -> Result<(), Failure> {
        cu!(self, cuStreamDestroy_v2(*mut c_void)(stream))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let close = || -> Result<(), Failure> {
            cu!(self, cuCtxSetCurrent(*mut c_void)(std::ptr::null_mut()))?;
            cu!(self, cuDevicePrimaryCtxRelease_v2(c_int)(self.device))
        };
        if let Err(error) = close() {
            println!("INFO closing the raw context: {error}");
        }
    }
}
