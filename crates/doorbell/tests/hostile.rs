//! Programs that ask for odd things: they get an answer, or an error that says what to do; never a panic or a hang.

mod common;

use std::time::Duration;

use common::{Bench, caller_driven, device};
use doorbell::{Dims, Place};

const ONE: Dims = Dims::new(1, 1);

/// Every wait takes "for ever" as a time-out; what ends at once ends at once.
#[test]
fn for_ever_is_a_time_out() {
    const FOR_EVER: Duration = Duration::MAX;
    for device in [device(), caller_driven()] {
        let b = Bench::new(device, Place::Gpu, 4096);
        let qp = b.qp();
        let export = qp.export().unwrap();
        let mut put = b.rate(&export, 64);
        put.remote.key ^= 0x5555_0000;
        b.launch("put_bw", ONE, &put).wait(FOR_EVER).unwrap();
        assert!(b.device.next_error(FOR_EVER).is_some());
        drop(export);
        qp.destroy(FOR_EVER).unwrap();
        b.source.deregister(FOR_EVER).unwrap();
        let address = format!("@doorbell-for-ever-{}", std::process::id());
        let listener = b.device.listen(&address).unwrap();
        let other = common::device();
        std::thread::scope(|s| {
            let dialled = s.spawn(move || {
                other
                    .dial(&address, FOR_EVER)
                    .unwrap()
                    .exchange(b"a", FOR_EVER)
                    .unwrap()
            });
            assert_eq!(
                listener
                    .accept(FOR_EVER)
                    .unwrap()
                    .exchange(b"b", FOR_EVER)
                    .unwrap(),
                b"a"
            );
            assert_eq!(dialled.join().unwrap(), b"b");
        });
    }
}
