//! NCCL 2.28.9, played: it loads the object as its network, finds the GIN table in it, and its device code writes the older queues.
#![cfg(not(miri))]

#[path = "../../doorbell-nccl/tests/common/mod.rs"]
mod common;

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};

use common::gin::{Gin, Sharing, Signal, Win, With};
use common::{
    Gather, LONG, Pages, beside, each, log_lines, logger_arg, ok, on_the_host, unsafe_one,
};
use doorbell_nccl::abi::Status;
use doorbell_nccl::abi::gin::GinV11;
use doorbell_nccl::abi::net::{DeviceHandle, NetPropertiesV11, NetV11};

/// Connections of a communicator there, each with a context of its own.
const CONNECTIONS: usize = 4;
/// Its pools.
const SIGNALS: c_int = 64 << 10;

fn tables() -> (&'static NetV11, &'static GinV11) {
    static TABLES: OnceLock<(usize, usize)> = OnceLock::new();
    let (net, gin) = *TABLES.get_or_init(|| {
        // SAFETY: our own shared object; its initialisers are Rust's.
        let library = unsafe { libloading::Library::new(beside("libdoorbell_nccl_net.so")) };
        let library = library.expect("loaded");
        // SAFETY: tables of these types have these names.
        unsafe {
            let net = library.get::<*const NetV11>(b"ncclNetPlugin_v11\0");
            let gin = library.get::<*const GinV11>(b"ncclGinPlugin_v11\0");
            let found = (*net.expect("net") as usize, *gin.expect("gin") as usize);
            std::mem::forget(library);
            found
        }
    });
    // SAFETY: never unloaded.
    unsafe { (&*(net as *const NetV11), &*(gin as *const GinV11)) }
}

/// A connection of a rank.
struct Connection {
    comm: *mut c_void,
    context: *mut c_void,
    gin: Gin,
}

struct Old {
    rank: usize,
    gather: Arc<Gather>,
    net: *mut c_void,
    instance: *mut c_void,
    connections: Vec<Connection>,
}

impl Old {
    fn connect(rank: usize, gather: &Arc<Gather>) -> Self {
        let (net_table, t) = tables();
        let (mut net, mut early, mut instance) = (
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        );
        let mut count = 0;
        let mut properties = MaybeUninit::<NetPropertiesV11>::uninit();
        let mut traffic_class: c_int = -1;
        // SAFETY: (all) the tables' functions with arguments of their types.
        unsafe {
            let init = net_table.init.expect("init");
            let config = (&raw mut traffic_class).cast();
            let none = std::ptr::null_mut();
            ok(init(&mut net, 1, config, logger_arg(), none), "net init");
            ok(net_table.devices.expect("devices")(&mut count), "devices");
            let get = net_table.get_properties.expect("getProperties");
            ok(get(0, properties.as_mut_ptr()), "getProperties");
            // Of another type NCCL would not take it as a network.
            assert_eq!((count, properties.assume_init().device_type), (1, 0));
            // With the communicator, and again when GIN connects.
            for ctx in [&mut early, &mut instance] {
                ok(t.init.expect("init")(ctx, 1, logger_arg()), "init");
                ok(t.devices.expect("devices")(&mut count), "devices");
            }
            let get = t.get_properties.expect("getProperties");
            ok(get(0, properties.as_mut_ptr()), "getProperties");
            assert_eq!((count, properties.assume_init().device_type), (1, 3));
        }
        let mut one = Self {
            rank,
            gather: Arc::clone(gather),
            net,
            instance,
            connections: Vec::new(),
        };
        for _ in 0..CONNECTIONS {
            let mut handle = [0u8; 128];
            let (mut listening, mut comm, mut context) = (
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            );
            let mut device = std::ptr::null_mut::<DeviceHandle>();
            // SAFETY: as above.
            let device = unsafe {
                let at = handle.as_mut_ptr().cast();
                ok(
                    t.listen.expect("listen")(instance, 0, at, &mut listening),
                    "listen",
                );
                let mut all = gather.all(rank, &handle);
                let mut all: Vec<*mut c_void> =
                    all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
                let (ranks, me) = (gather.ranks as c_int, rank as c_int);
                let connect = t.connect.expect("connect");
                ok(
                    connect(early, all.as_mut_ptr(), ranks, me, listening, &mut comm),
                    "connect",
                );
                let create = t.create_context.expect("createContext");
                let status = create(comm, SIGNALS, SIGNALS, &mut context, &mut device);
                ok(status, "createContext");
                *device
            };
            ok(unsafe_one(t.close_listen, listening), "closeListen");
            assert_eq!(
                (
                    device.device_type,
                    device.device_version,
                    device.needs_progress
                ),
                (3, 100, 0)
            );
            let gin = Gin::old(device.handle as u64, rank, gather.ranks);
            one.connections.push(Connection { comm, context, gin });
        }
        one
    }

    /// Every connection registers every window.
    fn register(&self, pages: &Pages) -> Vec<(*mut c_void, Win)> {
        let register = tables().1.reg_mr_sym.expect("regMrSym");
        let on = |c: &Connection| {
            let (mut host, mut device) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the test keeps `pages` until it has deregistered.
            let status = unsafe {
                register(
                    c.comm,
                    pages.ptr(),
                    pages.len(),
                    2,
                    0,
                    &mut host,
                    &mut device,
                )
            };
            ok(status, "regMrSym");
            (host, Win(device as u64))
        };
        self.connections.iter().map(on).collect()
    }

    fn has_error(&self, n: usize) -> bool {
        let mut has = false;
        let query = tables().1.query_last_error.expect("queryLastError");
        // SAFETY: a live context and an out parameter.
        ok(
            unsafe { query(self.connections[n].context, &mut has) },
            "queryLastError",
        );
        has
    }

    fn close(self, windows: Vec<(*mut c_void, Win)>) {
        let (net, t) = tables();
        for (c, (window, _)) in self.connections.iter().zip(windows) {
            // SAFETY: what regMrSym gave, once.
            let status = unsafe { t.dereg_mr_sym.expect("deregMrSym")(c.comm, window) };
            ok(status, "deregMrSym");
        }
        for c in self.connections {
            ok(unsafe_one(t.destroy_context, c.context), "destroyContext");
            ok(unsafe_one(t.close_coll, c.comm), "closeColl");
        }
        ok(unsafe_one(t.finalize, self.instance), "finalize");
        // Seen of NCCL 2.28.9, once a process.
        ok(unsafe_one(t.finalize, std::ptr::null_mut()), "finalize");
        ok(unsafe_one(net.finalize, self.net), "net finalize");
    }
}

fn threads(ranks: usize, body: impl Fn(&Old) -> Vec<(*mut c_void, Win)> + Sync) {
    each(ranks, |rank, gather| {
        let one = Old::connect(rank, gather);
        let windows = body(&one);
        one.gather.barrier(rank);
        one.close(windows);
    });
}

#[test]
fn older_device_code_puts_signals_and_counts_on_every_connection() {
    threads(2, |one| {
        let pages = Pages::new(1 << 16);
        let windows = one.register(&pages);
        let peer = 1 - one.rank;
        for (n, c) in one.connections.iter().enumerate() {
            let (win, gin) = (windows[n].1, c.gin);
            let sharing = [Sharing::Gpu, Sharing::Cta, Sharing::Thread, Sharing::Gpu][n];
            let gin = gin.shared(sharing);
            // Several laps of the ring.
            for i in 1..=1000u64 {
                let with = With {
                    signal: Some((Signal::Indexed(70 + n as u32), 1)),
                    counter: Some(65_535),
                    ..With::default()
                };
                pages.write(8 * n, &i.to_ne_bytes());
                gin.put(
                    peer,
                    (win, 4096 + 8 * n as u64),
                    (win, 8 * n as u64),
                    8,
                    with,
                );
                gin.wait_counter(65_535, i, LONG);
            }
            gin.wait_signal(70 + n as u32, 1000, LONG);
            assert_eq!(pages.word(4096 + 8 * n), 1000);
            gin.put_value(
                peer,
                (win, 8192),
                &[n as u8 + 1; 4],
                Some((Signal::Indexed(1), 10)),
            );
            gin.wait_signal(1, 10, LONG);
            assert_eq!(
                pages.read(8192, 6),
                [n as u8 + 1, n as u8 + 1, n as u8 + 1, n as u8 + 1, 0, 0]
            );
            gin.flush_all(LONG).expect("complete");
            assert!(!one.has_error(n), "{:?}", log_lines());
            one.gather.barrier(one.rank);
        }
        windows
    });
}

#[test]
fn one_rank_talks_to_itself_and_eight_to_each_other() {
    for ranks in [1, 8] {
        threads(ranks, |one| {
            let pages = Pages::new(4096);
            let windows = one.register(&pages);
            let (gin, win) = (one.connections[0].gin, windows[0].1);
            pages.write(0, &[one.rank as u8 + 1; 8]);
            for peer in 0..ranks {
                let to = 64 + 8 * one.rank as u64;
                gin.put(
                    peer,
                    (win, to),
                    (win, 0),
                    8,
                    With::signal(Signal::Indexed(0), 1),
                );
            }
            gin.wait_signal(0, ranks as u64, LONG);
            for r in 0..ranks {
                assert_eq!(pages.read(64 + 8 * r, 8), [r as u8 + 1; 8]);
            }
            gin.flush_all(LONG).expect("complete");
            windows
        });
    }
}

#[test]
fn the_network_part_carries_nothing_and_says_so() {
    on_the_host();
    type Listen = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
    let (net, _) = tables();
    let (mut ctx, mut handle, mut listening) =
        (std::ptr::null_mut(), [0u8; 128], std::ptr::null_mut());
    // SAFETY: the table's functions by their types.
    let status = unsafe {
        let none = std::ptr::null_mut();
        let init = net.init.expect("init");
        ok(init(&mut ctx, 1, none, logger_arg(), none), "net init");
        let listen = std::mem::transmute::<*const c_void, Listen>(net.listen);
        listen(ctx, 0, handle.as_mut_ptr().cast(), &mut listening)
    };
    assert_eq!(status, 5, "ncclInvalidUsage");
    let text = log_lines().join("\n");
    assert!(
        text.contains("ranks of one host") && text.contains("NCCL_P2P_DISABLE"),
        "{text}"
    );
    for at in [
        net.connect,
        net.accept,
        net.reg_mr,
        net.dereg_mr,
        net.isend,
        net.irecv,
        net.iflush,
        net.test,
    ] {
        assert!(!at.is_null(), "NCCL calls it without looking");
    }
    ok(unsafe_one(net.finalize, ctx), "net finalize");
}

#[test]
fn a_release_with_other_structures_is_refused() {
    // A library that says that it is 2.30.4, with a logger in it.
    on_the_host();
    let folder = tempfile::tempdir().expect("a folder");
    let (source, library) = (
        folder.path().join("n.c"),
        folder.path().join("libnccl.so.2"),
    );
    std::fs::write(
        &source,
        "int ncclGetVersion(int *v) { *v = 23004; return 0; }\n\
         void logger(int a, unsigned long b, const char *c, int d, const char *e, ...) { (void)a; (void)b; (void)c; (void)d; (void)e; }\n",
    )
    .expect("written");
    let built = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status()
        .expect("cc, which Rust links with");
    assert!(built.success());
    // SAFETY: a library without initialisers; its logger has NCCL's type.
    unsafe {
        let library = libloading::Library::new(&library).expect("loaded");
        let logger = *library.get(b"logger\0").expect("a function");
        let mut ctx = std::ptr::null_mut();
        let status = tables().1.init.expect("init")(&mut ctx, 1, Some(logger));
        assert_eq!(status, 5, "ncclInvalidUsage");
        std::mem::forget(library);
    }
}
