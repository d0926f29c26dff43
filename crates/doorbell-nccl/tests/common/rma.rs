//! NCCL's CPU proxy, played: it calls the RMA table in NCCL's order, keeps requests until they are done, and runs the progress loop.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Instant;

use doorbell_nccl::abi::Status;
use doorbell_nccl::abi::net::NetPropertiesV12;
use doorbell_nccl::abi::rma::{RmaConfigV14, RmaV14};

use super::{Gather, LONG, Pages, log_lines, logger_arg, ok, shared_object, table, unsafe_one};

/// `NCCL_PTR_HOST`, `NCCL_PTR_CUDA`.
pub const HOST: c_int = 1;
pub const CUDA: c_int = 2;
/// `FORCE_SO` and `SIGNAL_NEVER_RESET`, as the proxy registers its signals.
pub const SIGNALS: u64 = 3;

/// The table, looked up as NCCL looks it up.
pub fn rma_table() -> &'static RmaV14 {
    // Loaded, and never unloaded.
    table();
    // SAFETY: our own shared object, which is loaded; a table of this type has this name.
    unsafe {
        let library = libloading::Library::new(shared_object()).expect("loaded");
        let at = library.get::<*const RmaV14>(b"ncclRmaPlugin_v14\0");
        &**at.expect("exported")
    }
}

/// A rank with a connection and an RMA context.
pub struct RmaRank {
    pub rank: usize,
    pub ranks: usize,
    pub gather: Arc<Gather>,
    ctx: *mut c_void,
    comm: *mut c_void,
    context: *mut c_void,
}

/// What `regMrSym` gave.
#[derive(Clone, Copy, Debug)]
pub struct Handle(pub *mut c_void);

/// A request that is not done.
#[derive(Debug)]
pub struct Request(*mut c_void);

/// A part of a region.
pub type At = (Handle, u64);

impl RmaRank {
    pub fn connect(rank: usize, gather: &Arc<Gather>, contexts: c_int) -> Self {
        let one = Self::join(rank, gather);
        let (status, context) = one.create(contexts);
        ok(status, "createContext");
        Self { context, ..one }
    }

    /// Everything before `createContext`.
    pub fn join(rank: usize, gather: &Arc<Gather>) -> Self {
        let t = rma_table();
        let (mut ctx, mut listening) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut comm = std::ptr::null_mut();
        let (mut count, mut handle) = (0, [0u8; 128]);
        let mut properties = std::mem::MaybeUninit::<NetPropertiesV12>::uninit();
        // SAFETY: (all) the table's functions with out parameters of their types.
        unsafe {
            ok(t.init.expect("init")(&mut ctx, 7, logger_arg()), "init");
            ok(t.devices.expect("devices")(&mut count), "devices");
            let get = t.get_properties.expect("getProperties");
            ok(get(0, properties.as_mut_ptr()), "getProperties");
            let properties = properties.assume_init();
            // NCCL: the proxy's type, and 32 requests a receive, of which it wants a power of two.
            assert_eq!((count, properties.device_type), (1, 2));
            assert!((32 * properties.max_recvs as u32).is_power_of_two());
            let listen = t.listen.expect("listen");
            ok(
                listen(ctx, 0, handle.as_mut_ptr().cast(), &mut listening),
                "listen",
            );
            let mut all = gather.all(rank, &handle);
            let mut all: Vec<*mut c_void> = all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
            // NCCL's host RMA passes something else as the first argument.
            let status = t.connect.expect("connect")(
                std::ptr::dangling_mut(),
                all.as_mut_ptr(),
                gather.ranks as c_int,
                rank as c_int,
                listening,
                &mut comm,
            );
            ok(status, "connect");
        }
        ok(unsafe_one(t.close_listen, listening), "closeListen");
        Self {
            rank,
            ranks: gather.ranks,
            gather: Arc::clone(gather),
            ctx,
            comm,
            context: std::ptr::null_mut(),
        }
    }

    pub fn create(&self, contexts: c_int) -> (Status, *mut c_void) {
        let mut config = RmaConfigV14 {
            contexts,
            traffic_class: -1,
            rank_stride: 1,
        };
        let mut context = std::ptr::null_mut();
        // SAFETY: as above.
        let status = unsafe {
            let create = rma_table().create_context.expect("createContext");
            create(self.comm, &mut config, &mut context)
        };
        (status, context)
    }

    pub fn register(&self, pages: &Pages, kind: c_int, flags: u64) -> Handle {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the test keeps `pages` until it has deregistered.
        let status = unsafe {
            let register = rma_table().reg_mr_sym.expect("regMrSym");
            let (at, len) = (pages.ptr(), pages.len());
            register(self.comm, at, len, kind, flags, &mut handle)
        };
        ok(status, "regMrSym");
        Handle(handle)
    }

    pub fn deregister(&self, handle: Handle) {
        // SAFETY: what `register` gave, once.
        let status = unsafe { rma_table().dereg_mr_sym.expect("deregMrSym")(self.comm, handle.0) };
        ok(status, "deregMrSym");
    }

    pub fn try_put(
        &self,
        context: c_int,
        rank: u32,
        put: Option<(At, At, usize)>,
        signal: Option<(At, u64, u32)>,
    ) -> Result<Request, Status> {
        let none = (Handle(std::ptr::null_mut()), 0);
        let (from, to, size) = put.unwrap_or((none, none, 0));
        let mut request = std::ptr::null_mut();
        let t = rma_table();
        // SAFETY: handles of this rank, or what must be refused.
        let status = unsafe {
            match signal {
                Some((at, value, op)) => t.iput_signal.expect("iputSignal")(
                    self.context,
                    context,
                    from.1,
                    from.0.0,
                    size,
                    to.1,
                    to.0.0,
                    rank,
                    at.1,
                    at.0.0,
                    value,
                    op,
                    true,
                    &mut request,
                ),
                None => t.iput.expect("iput")(
                    self.context,
                    context,
                    from.1,
                    from.0.0,
                    size,
                    to.1,
                    to.0.0,
                    rank,
                    &mut request,
                ),
            }
        };
        match status {
            0 => {
                assert!(!request.is_null());
                Ok(Request(request))
            }
            other => Err(other),
        }
    }

    /// `iput` or `iputSignal` (which adds).
    pub fn put(
        &self,
        rank: usize,
        from: At,
        to: At,
        size: usize,
        signal: Option<(At, u64)>,
    ) -> Request {
        let signal = signal.map(|(at, add)| (at, add, 2));
        self.try_put(0, rank as u32, Some((from, to, size)), signal)
            .unwrap_or_else(|e| panic!("{e}: {:?}", log_lines().last()))
    }

    pub fn get(&self, rank: usize, from: At, to: At, size: usize) -> Request {
        let mut request = std::ptr::null_mut();
        // SAFETY: handles of this rank.
        let status = unsafe {
            rma_table().iget.expect("iget")(
                self.context,
                0,
                from.1,
                from.0.0,
                size,
                to.1,
                to.0.0,
                rank as u32,
                &mut request,
            )
        };
        ok(status, "iget");
        Request(request)
    }

    /// `iflush` has nothing to wait for.
    pub fn flush(&self, rank: usize, handle: Handle) {
        let mut request = std::ptr::dangling_mut();
        // SAFETY: as above.
        let status = unsafe {
            let flush = rma_table().iflush.expect("iflush");
            flush(self.context, 0, handle.0, rank as u32, &mut request)
        };
        ok(status, "iflush");
        assert!(request.is_null());
    }

    /// `test`; the request is gone unless the answer is "not yet".
    pub fn test(&self, request: Request) -> Result<Option<Request>, Status> {
        let mut done = -1;
        // SAFETY: a request that is not done.
        let status = unsafe { rma_table().test.expect("test")(self.comm, request.0, &mut done) };
        match (status, done) {
            (0, 1) => Ok(None),
            (0, 0) => Ok(Some(request)),
            (0, other) => panic!("done is {other}"),
            (status, _) => Err(status),
        }
    }

    /// Until it is done, with the progress loop that NCCL runs.
    pub fn wait(&self, mut request: Request) -> Result<(), Status> {
        let deadline = Instant::now() + LONG;
        while let Some(left) = self.test(request)? {
            request = left;
            self.progress();
            assert!(Instant::now() < deadline, "a request is never done");
        }
        Ok(())
    }

    pub fn progress(&self) {
        let progress = rma_table().rma_progress;
        ok(unsafe_one(progress, self.context), "rmaProgress");
    }

    /// Runs the progress loop until something holds.
    pub fn until(&self, what: &str, done: impl Fn() -> bool) {
        let deadline = Instant::now() + LONG;
        while !done() {
            self.progress();
            assert!(Instant::now() < deadline, "{what}");
            std::thread::yield_now();
        }
    }

    pub fn has_error(&self) -> bool {
        let mut has = false;
        // SAFETY: a live context and an out parameter.
        let status = unsafe {
            rma_table().query_last_error.expect("queryLastError")(self.context, &mut has)
        };
        ok(status, "queryLastError");
        has
    }

    /// Ends the contexts; others take their place.
    pub fn destroy(&mut self, others: *mut c_void) {
        let old = std::mem::replace(&mut self.context, others);
        ok(
            unsafe_one(rma_table().destroy_context, old),
            "destroyContext",
        );
    }

    pub fn close(self) {
        let t = rma_table();
        if !self.context.is_null() {
            ok(
                unsafe_one(t.destroy_context, self.context),
                "destroyContext",
            );
        }
        ok(unsafe_one(t.close_coll, self.comm), "closeColl");
        ok(unsafe_one(t.finalize, self.ctx), "finalize");
    }
}

/// Puts with a signal each to the next rank; no signal comes before its data. Then gets them back.
pub fn proxy(one: &RmaRank, pages: impl Fn(usize) -> Pages, count: u64) {
    let (me, to) = (one.rank, (one.rank + 1) % one.ranks);
    let (data, words) = (pages(1 << 16), pages(4096));
    let inline = Pages::new(4096);
    let handle = one.register(&data, CUDA, 0);
    let signals = one.register(&words, CUDA, SIGNALS);
    let values = one.register(&inline, HOST, 0);
    let slot = |i: u64| 8 * (i % 512);
    for i in 0..512 {
        data.write(
            slot(i) as usize,
            &(me as u64 * 1_000_000 + i + 1).to_ne_bytes(),
        );
    }
    one.gather.barrier(me);
    let from = (me + one.ranks - 1) % one.ranks;
    let check = |seen: u64| {
        for i in 0..seen.min(512) {
            let got = data.word(32768 + slot(i) as usize);
            assert_eq!(
                got,
                from as u64 * 1_000_000 + i + 1,
                "signal {seen} came first"
            );
        }
    };
    let mut under_way = std::collections::VecDeque::new();
    for i in 0..count {
        let target = (handle, 32768 + slot(i));
        under_way.push_back(one.put(to, (handle, slot(i)), target, 8, Some(((signals, 8), 1))));
        if under_way.len() == 512 {
            one.wait(under_way.pop_front().expect("one")).expect("done");
        }
        one.progress();
        check(words.word(8));
    }
    under_way.drain(..).for_each(|r| one.wait(r).expect("done"));
    one.until("signals do not arrive", || words.word(8) >= count);
    check(count);
    // A value that the host holds, a signal alone, nothing at all.
    inline.write(16, &[7; 8]);
    let value = one.put(
        to,
        (values, 16),
        (handle, 60000),
        8,
        Some(((signals, 0), 40)),
    );
    one.wait(value).expect("done");
    let alone = one.try_put(0, to as u32, None, Some(((signals, 0), 99, 1)));
    one.wait(alone.expect("begun")).expect("done");
    let nothing = one.put(to, (handle, 0), (handle, 0), 0, None);
    one.wait(nothing).expect("done");
    one.until("a signal does not arrive", || words.word(0) == 41);
    assert_eq!(data.read(60000, 8), [7; 8]);
    assert_eq!(
        words.word(8),
        count,
        "no signal is lost, none counted twice"
    );
    // What arrived at the next rank, fetched from there.
    let back = one.get(to, (handle, 32768), (handle, 8192), 4096);
    one.wait(back).expect("done");
    one.flush(to, handle);
    assert!(data.read(8192, 4096) == data.read(0, 4096));
    assert!(!one.has_error(), "{:?}", log_lines());
    one.gather.barrier(me);
    for handle in [values, signals, handle] {
        one.deregister(handle);
    }
}
