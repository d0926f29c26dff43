//! A test host that does what NCCL does: loads the shared object, looks the table up, and calls it in NCCL's order from its threads.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file includes this and uses a part of it"
)]

pub mod gin;
pub mod hammer;
pub mod jobs;
pub mod rma;
pub mod scenes;

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use doorbell_nccl::abi::gin::{GinConfigV14, GinPropertiesV14, GinV14};
use doorbell_nccl::abi::net::{DeviceHandle, NetPropertiesV12};
use doorbell_nccl::abi::{HANDLE, Status};

use gin::{Gin, Win};

pub const LONG: Duration = Duration::from_secs(30);

/// The shared object that cargo built beside this test.
pub fn shared_object() -> PathBuf {
    beside("libdoorbell_nccl.so")
}

pub fn beside(name: &str) -> PathBuf {
    let deps = std::env::current_exe().expect("this program");
    let deps = deps.parent().expect("its folder");
    let found = [deps.join(name), deps.join("..").join(name)];
    found
        .into_iter()
        .find(|p| p.is_file())
        .unwrap_or_else(|| panic!("{name} beside this test"))
}

/// The table, looked up as NCCL looks it up.
pub fn table() -> &'static GinV14 {
    static TABLE: OnceLock<usize> = OnceLock::new();
    let at = *TABLE.get_or_init(|| {
        // SAFETY: our own shared object; its initialisers are Rust's.
        let library = unsafe { libloading::Library::new(shared_object()) }.expect("loaded");
        // SAFETY: a table of this type has this name.
        let at = unsafe { library.get::<*const GinV14>(b"ncclGinPlugin_v14\0") }.expect("exported");
        let at = *at as usize;
        // Closed and opened again, as NCCL does between communicators: it must stay where it is.
        drop(library);
        // SAFETY: as above.
        let again = unsafe { libloading::Library::new(shared_object()) }.expect("loaded again");
        // SAFETY: as above.
        let same = unsafe { again.get::<*const GinV14>(b"ncclGinPlugin_v14\0") }.expect("exported");
        assert_eq!(*same as usize, at, "it was unloaded in between");
        std::mem::forget(again);
        at
    });
    // SAFETY: a table that is never unloaded.
    unsafe { &*(at as *const GinV14) }
}

/// NCCL's log, collected.
pub fn log_lines() -> Vec<String> {
    LOG.lock().expect("the log").clone()
}

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A line with these words keeps the logger so long, as a terminal that was paused does.
pub static HOLD_UP: OnceLock<(&str, Duration)> = OnceLock::new();

/// What NCCL passes as its logger; the format is always "%s" with one argument.
pub unsafe extern "C" fn logger(
    level: c_int,
    _: c_ulong,
    _: *const c_char,
    _: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: C strings of the plug-in.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s");
    let line = format!("{level} {}", text.to_string_lossy());
    if std::env::var_os("DOORBELL_TEST_LOG").is_some() {
        eprintln!("{line}");
    }
    let words = HOLD_UP.get().filter(|(words, _)| line.contains(words));
    LOG.lock().expect("the log").push(line);
    if let Some((_, time)) = words {
        std::thread::sleep(*time);
    }
}

pub fn logger_arg() -> doorbell_nccl::abi::Logger {
    // SAFETY: on the platforms that there are, a call with one variable argument arrives as one with six arguments; the plug-in passes
    // exactly one.
    Some(unsafe {
        std::mem::transmute::<
            unsafe extern "C" fn(
                c_int,
                c_ulong,
                *const c_char,
                c_int,
                *const c_char,
                *const c_char,
            ),
            unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...),
        >(logger)
    })
}

pub fn ok(status: Status, what: &str) {
    assert_eq!(status, 0, "{what}: {:?}", log_lines().last());
}

/// NCCL's bootstrap: every rank gives bytes and gets all of them. Ranks may be threads of several processes: they meet in a folder.
pub struct Gather {
    pub ranks: usize,
    folder: PathBuf,
    rounds: Vec<AtomicU64>,
    /// Removed with the gathering, by whoever made it.
    _made: Option<tempfile::TempDir>,
}

impl Gather {
    pub fn new(ranks: usize) -> Arc<Self> {
        let made = tempfile::tempdir().expect("a folder");
        let folder = made.path().to_owned();
        Self::at(ranks, folder, Some(made))
    }

    /// In a folder that another process made.
    pub fn at(ranks: usize, folder: PathBuf, made: Option<tempfile::TempDir>) -> Arc<Self> {
        let rounds = (0..ranks).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self {
            ranks,
            folder,
            rounds,
            _made: made,
        })
    }

    /// Another job of two beside this one, by the name that both have for it.
    pub fn beside(&self, name: &str) -> Arc<Self> {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        Self::at(2, folder, None)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What every rank gave; `None` if one did not come in time.
    pub fn try_all(&self, rank: usize, mine: &[u8], time: Duration) -> Option<Vec<Vec<u8>>> {
        let round = self.rounds[rank].fetch_add(1, Relaxed);
        let file = |rank: usize| self.folder.join(format!("{round}-{rank}"));
        let hidden = self.folder.join(format!(".{round}-{rank}"));
        std::fs::write(&hidden, mine).expect("written");
        std::fs::rename(&hidden, file(rank)).expect("renamed");
        let deadline = Instant::now() + time;
        let mut all = Vec::new();
        while all.len() < self.ranks {
            match std::fs::read(file(all.len())) {
                Ok(bytes) => all.push(bytes),
                Err(_) if Instant::now() >= deadline => return None,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Some(all)
    }

    pub fn all(&self, rank: usize, mine: &[u8]) -> Vec<Vec<u8>> {
        self.try_all(rank, mine, LONG)
            .expect("every rank of the test comes")
    }

    pub fn barrier(&self, rank: usize) {
        self.all(rank, &[]);
    }
}

/// Memory as a window: on the host GPU it is host memory.
pub struct Pages {
    at: *mut u8,
    len: usize,
    _fd: Option<OwnedFd>,
    /// Unmapped with it.
    owned: bool,
}

/// A sealed memfd.
fn memfd(len: usize) -> OwnedFd {
    // SAFETY: plain system calls on a descriptor that is ours.
    unsafe {
        let fd = libc::memfd_create(
            c"window".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
        );
        assert!(fd >= 0);
        let fd = OwnedFd::from_raw_fd(fd);
        assert_eq!(libc::ftruncate(fd.as_raw_fd(), len as libc::off_t), 0);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals), 0);
        fd
    }
}

// SAFETY: plain memory; tests access it by volatile copies.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Zeroed, and only touched pages exist.
    pub fn new(len: usize) -> Self {
        // SAFETY: a fresh anonymous mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self {
            at: at.cast(),
            len,
            _fd: None,
            owned: true,
        }
    }

    /// Memory of somebody who keeps it.
    pub fn foreign(at: u64, len: usize) -> Self {
        Self {
            at: at as *mut u8,
            len,
            _fd: None,
            owned: false,
        }
    }

    /// The same 2 MiB again and again.
    pub fn repeated(len: usize) -> Self {
        const STEP: usize = 2 << 20;
        let pages = Self::new(len.next_multiple_of(STEP));
        let fd = memfd(STEP);
        for at in (0..pages.len).step_by(STEP) {
            // SAFETY: replaces a part of the mapping above.
            let got = unsafe {
                libc::mmap(
                    pages.at.add(at).cast(),
                    STEP,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    fd.as_raw_fd(),
                    0,
                )
            };
            assert_ne!(got, libc::MAP_FAILED);
        }
        pages
    }

    /// In a sealed memfd that stays open, as an allocator of shareable memory has it.
    pub fn shared(len: usize) -> Self {
        let fd = memfd(len);
        // SAFETY: a fresh mapping of the whole memfd.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self {
            at: at.cast(),
            len,
            _fd: Some(fd),
            owned: true,
        }
    }

    pub fn ptr(&self) -> *mut c_void {
        self.at.cast()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: in range.
            unsafe { self.at.add(offset + i).write_volatile(*b) };
        }
    }

    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: in range.
        (0..len)
            .map(|i| unsafe { self.at.add(offset + i).read_volatile() })
            .collect()
    }

    /// An aligned word, read whole: somebody may be counting in it.
    pub fn word(&self, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len);
        // SAFETY: in range, and aligned, as mappings begin at a page.
        unsafe {
            (*self.at.add(offset).cast::<AtomicU64>()).load(std::sync::atomic::Ordering::Acquire)
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: mapped by one of the functions above.
            unsafe { libc::munmap(self.at.cast(), self.len) };
        }
    }
}

/// One rank between `init` and `finalize`.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub gather: Arc<Gather>,
    ctx: *mut c_void,
    pub comm: *mut c_void,
}

impl Rank {
    /// What NCCL does up to `connect` and `closeListen`.
    pub fn connect(rank: usize, gather: &Arc<Gather>) -> Self {
        let mut one = Self::init(rank, gather);
        let (listening, handles) = one.listen();
        let status = one.join(&handles, listening);
        ok(status, "connect");
        ok(unsafe_one(table().close_listen, listening), "closeListen");
        one
    }

    pub fn init(rank: usize, gather: &Arc<Gather>) -> Self {
        // NCCL holds a lock of the process around these.
        static PLUGIN: Mutex<()> = Mutex::new(());
        let _held = PLUGIN.lock().expect("the plug-in's lock");
        let t = table();
        let mut ctx = std::ptr::null_mut();
        let mut count = 0;
        let mut properties = std::mem::MaybeUninit::<NetPropertiesV12>::uninit();
        let mut gin = GinPropertiesV14::default();
        // SAFETY: (all) the table's functions with out parameters of their types.
        unsafe {
            ok(
                t.init.expect("init")(&mut ctx, 0x1234, logger_arg()),
                "init",
            );
            ok(t.devices.expect("devices")(&mut count), "devices");
            ok(
                t.get_properties.expect("getProperties")(0, properties.as_mut_ptr()),
                "getProperties",
            );
            ok(
                t.get_gin_properties.expect("getGinProperties")(&mut gin),
                "getGinProperties",
            );
            assert_eq!(properties.assume_init().device_type, 3);
        }
        assert!(!ctx.is_null() && count == 1 && gin.strong_signals && gin.va_signals);
        Self {
            rank,
            ranks: gather.ranks,
            gather: Arc::clone(gather),
            ctx,
            comm: std::ptr::null_mut(),
        }
    }

    pub fn listen(&self) -> (*mut c_void, Vec<Vec<u8>>) {
        let (listening, handle) = self.listen_only();
        let all = self.gather.all(self.rank, &handle);
        (listening, all)
    }

    pub fn listen_only(&self) -> (*mut c_void, [u8; HANDLE]) {
        let mut handle = [0u8; HANDLE];
        let mut listening = std::ptr::null_mut();
        // SAFETY: a buffer of 128 bytes and an out parameter.
        let status = unsafe {
            table().listen.expect("listen")(self.ctx, 0, handle.as_mut_ptr().cast(), &mut listening)
        };
        ok(status, "listen");
        (listening, handle)
    }

    /// What `init` gave.
    pub fn instance(&self) -> *mut c_void {
        self.ctx
    }

    pub fn join(&mut self, handles: &[Vec<u8>], listening: *mut c_void) -> Status {
        let mut handles: Vec<Vec<u8>> = handles.to_vec();
        let mut pointers: Vec<*mut c_void> =
            handles.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        // SAFETY: one 128-byte handle a rank.
        unsafe {
            table().connect.expect("connect")(
                self.ctx,
                pointers.as_mut_ptr(),
                self.ranks as c_int,
                self.rank as c_int,
                listening,
                &mut self.comm,
            )
        }
    }

    /// `regMrSym`: the host's and the device's handle.
    pub fn register(&self, pages: &Pages, flags: u64) -> (*mut c_void, Win) {
        self.try_register(pages, flags)
            .unwrap_or_else(|| panic!("regMrSym: {:?}", log_lines().last()))
    }

    pub fn try_register(&self, pages: &Pages, flags: u64) -> Option<(*mut c_void, Win)> {
        let (mut host, mut device) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the test keeps `pages` until it has deregistered.
        let status = unsafe {
            table().reg_mr_sym.expect("regMrSym")(
                self.comm,
                pages.ptr(),
                pages.len(),
                2,
                flags,
                &mut host,
                &mut device,
            )
        };
        if status != 0 {
            return None;
        }
        assert!(!host.is_null() && !device.is_null());
        Some((host, Win(device as u64)))
    }

    pub fn deregister(&self, window: *mut c_void) {
        // SAFETY: what `register` gave, once.
        let status = unsafe { table().dereg_mr_sym.expect("deregMrSym")(self.comm, window) };
        ok(status, "deregMrSym");
    }

    /// `createContext`.
    pub fn create(&self, config: GinConfigV14) -> Context {
        let (status, context) = self.try_create(config);
        ok(status, "createContext");
        context
    }

    pub fn try_create(&self, mut config: GinConfigV14) -> (Status, Context) {
        let (mut ctx, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut::<DeviceHandle>());
        // SAFETY: out parameters.
        let status = unsafe {
            table().create_context.expect("createContext")(
                self.comm,
                &mut config,
                &mut ctx,
                &mut handle,
            )
        };
        let address = match status {
            0 => {
                // SAFETY: the plug-in keeps it until `destroyContext`.
                let handle = unsafe { *handle };
                assert_eq!((handle.device_type, handle.needs_progress), (3, 0));
                handle.handle as u64
            }
            _ => 0,
        };
        let stride = if config.backend_version == 1 { 72 } else { 88 };
        let context = Context {
            ctx,
            handle: address,
            stride,
            rank: self.rank,
            ranks: self.ranks,
        };
        (status, context)
    }

    /// What NCCL does when the communicator ends.
    pub fn close(self) {
        ok(unsafe_one(table().close_coll, self.comm), "closeColl");
        ok(unsafe_one(table().finalize, self.ctx), "finalize");
    }

    /// Ends `init` alone.
    pub fn finalize(self) {
        ok(unsafe_one(table().finalize, self.ctx), "finalize");
    }
}

/// Calls an entry with one object.
pub fn unsafe_one(
    entry: Option<unsafe extern "C" fn(*mut c_void) -> Status>,
    object: *mut c_void,
) -> Status {
    // SAFETY: the tests pass what the plug-in gave, or what it has to refuse.
    unsafe { entry.expect("an entry")(object) }
}

/// What `createContext` gave.
pub struct Context {
    pub ctx: *mut c_void,
    pub handle: u64,
    stride: u64,
    rank: usize,
    ranks: usize,
}

impl Context {
    pub fn gin(&self, context: usize) -> Gin {
        Gin::new(self.handle, self.stride, context, self.rank, self.ranks)
    }

    /// `queryLastError`.
    pub fn has_error(&self) -> bool {
        let mut has = false;
        // SAFETY: a live context and an out parameter.
        let status =
            unsafe { table().query_last_error.expect("queryLastError")(self.ctx, &mut has) };
        ok(status, "queryLastError");
        has
    }

    pub fn destroy(self) {
        ok(
            unsafe_one(table().destroy_context, self.ctx),
            "destroyContext",
        );
    }
}

pub fn config(signals: i32, counters: i32, contexts: i32, depth: i32) -> GinConfigV14 {
    GinConfigV14 {
        signals,
        counters,
        contexts,
        queue_depth: depth,
        traffic_class: -1,
        backend_version: 2,
        rank_stride: 1,
    }
}

/// The host GPU, whatever this machine has, unless the test says otherwise; before any thread of the test calls the plug-in.
pub fn on_the_host() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: once, before the plug-in was loaded; nobody else of the test program reads the environment meanwhile.
        unsafe {
            if std::env::var_os("DOORBELL_GPU").is_none() {
                std::env::set_var("DOORBELL_GPU", "host");
            }
            if std::env::var_os("DOORBELL_NCCL_ADDR").is_none() {
                std::env::set_var("DOORBELL_NCCL_ADDR", "127.0.0.1");
            }
            // The test program plays NCCL, and cannot be asked.
            std::env::set_var("DOORBELL_NCCL_RELEASE", "2.28.9");
            if std::env::var_os("DOORBELL_NCCL_TIMEOUT").is_none() {
                std::env::set_var("DOORBELL_NCCL_TIMEOUT", "60");
            }
        }
        table();
    });
}

/// Runs `body` as so many ranks, one thread each.
pub fn each(ranks: usize, body: impl Fn(usize, &Arc<Gather>) + Sync) {
    on_the_host();
    let gather = Gather::new(ranks);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..ranks)
            .map(|rank| {
                let (gather, body) = (&gather, &body);
                scope.spawn(move || body(rank, gather))
            })
            .collect();
        all.into_iter().for_each(|t| t.join().expect("a rank"));
    });
}

/// As [`each`], connected.
pub fn threads(ranks: usize, body: impl Fn(&Rank) + Sync) {
    each(ranks, |rank, gather| scenes::whole(rank, gather, &body));
}

/// Does it come to hold in time?
pub fn soon(time: Duration, done: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + time;
    while !done() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// NCCL is told of an error within `time`, and the log says all of `words`.
pub fn told(context: &Context, time: Duration, words: &[&str]) {
    assert!(soon(time, || context.has_error()), "{:?}", log_lines());
    logged(words);
}

/// The log says all of it, if not now then when the thread that writes it has had a processor: who reports a failure waits for that a moment, not for ever.
pub fn logged(words: &[&str]) {
    let said = || {
        let text = log_lines().join("\n");
        words.iter().all(|word| text.contains(word))
    };
    assert!(soon(LONG, said), "{words:?}: {:?}", log_lines());
}
