//! The stand-in for the driver library, built and opened, and small things its tests share.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use doorbell_gpu::{Buffer, Dims, Gpu, GpuError, GpuSelect, Kernel, Launch, LaunchOpts, Module};

pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const PTX: &str = "
.version 8.2
.visible .entry store(.param .u64 p) { ret; }
.visible .entry spin(.param .u64 p) { ret; }
.visible .entry fault(.param .u64 p) { ret; }
";

pub(crate) struct Mock {
    pub(crate) library: libloading::Library,
    pub(crate) path: PathBuf,
}

impl Mock {
    /// Builds a library of its own for a test, since the driver's state is one a library.
    pub(crate) fn build(test: &str, flags: &[&str]) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("libcuda-{test}.so"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mock/libcuda.c");
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&path)
            .args(flags)
            .arg(source)
            .status()
            .expect("cc, which Rust links with");
        assert!(status.success());
        // SAFETY: the library above has no initialisers.
        let library = unsafe { libloading::Library::new(&path) }.unwrap();
        Self { library, path }
    }

    pub(crate) fn get(&self, name: &str) -> u64 {
        type Get = unsafe extern "C" fn(*const c_char) -> u64;
        let c_name = CString::new(name).unwrap();
        // SAFETY: the function's type in the source.
        let value = unsafe { self.library.get::<Get>(b"mock_get").unwrap()(c_name.as_ptr()) };
        assert_ne!(value, u64::MAX, "no figure {name}");
        value
    }

    pub(crate) fn call_int(&self, name: &str, argument: c_int) {
        // SAFETY: the functions called so take one int.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn(c_int)>(name.as_bytes())
                .unwrap()(argument)
        }
    }

    pub(crate) fn call(&self, name: &str) {
        // SAFETY: the functions called so take nothing.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn()>(name.as_bytes())
                .unwrap()()
        }
    }

    pub(crate) fn foreign(&self, size: usize, device: c_int) -> u64 {
        type Alloc = unsafe extern "C" fn(usize, c_int) -> u64;
        // SAFETY: the function's type in the source.
        unsafe { self.library.get::<Alloc>(b"mock_foreign_alloc").unwrap()(size, device) }
    }

    /// Memory of GPU 0 and of 0: its primary context, 1: another, 2: a pool that it may use, 3: one that it may not.
    pub(crate) fn foreign_owned(&self, size: usize, owner: c_int) -> u64 {
        type Alloc = unsafe extern "C" fn(usize, c_int) -> u64;
        // SAFETY: the function's type in the source.
        unsafe { self.library.get::<Alloc>(b"mock_foreign_owned").unwrap()(size, owner) }
    }

    pub(crate) fn foreign_vmm(&self, size: usize, device: c_int) -> u64 {
        type Alloc = unsafe extern "C" fn(usize, c_int) -> u64;
        // SAFETY: the function's type in the source.
        unsafe { self.library.get::<Alloc>(b"mock_foreign_vmm").unwrap()(size, device) }
    }

    pub(crate) fn foreign_pair(&self, size: usize, host: bool) -> u64 {
        type Alloc = unsafe extern "C" fn(usize, c_int) -> u64;
        // SAFETY: the function's type in the source.
        unsafe { self.library.get::<Alloc>(b"mock_foreign_pair").unwrap()(size, host.into()) }
    }

    /// Nothing went wrong, and the thread is as it was.
    pub(crate) fn clean(&self) {
        // SAFETY: the function's type in the source; the text is static.
        let text = unsafe {
            let get = self
                .library
                .get::<unsafe extern "C" fn() -> *const c_char>(b"mock_violation");
            CStr::from_ptr(get.unwrap()())
                .to_string_lossy()
                .into_owned()
        };
        assert_eq!((self.get("violations"), text.as_str()), (0, ""));
        assert_eq!((self.get("depth"), self.get("mode")), (0, 0));
    }

    pub(crate) fn try_open(&self, select: GpuSelect) -> Result<Gpu, GpuError> {
        Gpu::open_with_driver(
            &select,
            Module {
                ptx: PTX,
                host: &[],
            },
            &self.path,
        )
    }

    pub(crate) fn open(&self) -> Gpu {
        self.try_open(GpuSelect::Cuda(None)).unwrap()
    }
}

pub(crate) fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

pub(crate) fn read_u64(buffer: &Buffer) -> u64 {
    let mut b = [0; 8];
    buffer.read(0, &mut b).unwrap();
    u64::from_ne_bytes(b)
}

pub(crate) fn launch(gpu: &Gpu, kernel: &Kernel, params: &[u64]) -> Launch {
    // SAFETY: the stand-in's kernels take these words, whose addresses are in buffers that the tests keep.
    unsafe {
        gpu.launch(
            kernel,
            Dims::new(1, 1),
            &bytes(params),
            LaunchOpts::default(),
        )
    }
    .unwrap()
}
