//! A forked child of a process that has a device: refused everything, and free to exit.
#![cfg(not(miri))]

mod common;

use std::time::{Duration, Instant};

use common::{Bench, LONG, caller_driven, device};
use doorbell::{Access, Dims, Error, GpuError, LinkKind, Place};

fn forked<T: std::fmt::Debug>(result: doorbell::Result<T>) -> bool {
    matches!(result, Err(Error::Gpu(GpuError::Forked)))
}

#[test]
fn a_forked_child_is_refused_and_does_not_hang() {
    for device in [device(), caller_driven()] {
        let b = Bench::new(device, Place::Shared, 4096);
        let qp = b.qp();
        let export = qp.export().unwrap();
        let put = b.rate(&export, 64);
        // SAFETY: the child calls only what is under test and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = [
                forked(b.device.pd()),
                forked(b.device.alloc(Place::Host, 64)),
                forked(b.pd.register(b.target.memory(), Access::ALL)),
                forked(b.pd.qp().build()),
                // SAFETY: refused before anything runs.
                forked(unsafe { b.device.launch("put_bw", Dims::new(1, 1), &put) }),
                forked(qp.fail()),
                forked(b.device.listen("@doorbell-fork-test")),
                b.device.next_error(Duration::ZERO).is_none(),
                !b.device.poll(),
                qp.endpoint(LinkKind::Shm, &[])
                    .is_ok_and(|e| e.qpn == qp.qpn()),
            ];
            let destroyed = forked(qp.destroy(LONG));
            drop((export, b));
            let ok = destroyed && refused.iter().all(|&r| r);
            let code = refused.iter().position(|&r| !r).map_or(0, |i| i as i32 + 1);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(if ok { 0 } else { 100 + code }) };
        }
        let mut status = 0;
        let deadline = Instant::now() + LONG;
        // SAFETY: waits for the child made above.
        while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
            if Instant::now() > deadline {
                // SAFETY: as above; the child hangs.
                unsafe { libc::kill(child, libc::SIGKILL) };
                panic!("the forked child hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "child ended with {status:#x}"
        );
        // The parent has lost nothing.
        assert_eq!(b.run("put_bw", Dims::new(1, 1), &put)[0].error, 0);
        qp.check().unwrap();
    }
}
