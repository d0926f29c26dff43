use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::vec::Vec;

use super::{Hooks, HostGrid, HostThread};
use crate::arch::Arch;

fn run<const LANES: usize>(
    blocks: u32,
    threads: u32,
    f: impl Fn(&HostThread<LANES>) + Send + Sync,
) {
    let grid = HostGrid::<LANES>::new(blocks, threads, Hooks::default());
    std::thread::scope(|s| {
        for b in 0..blocks {
            for t in 0..threads {
                let (grid, f) = (&grid, &f);
                s.spawn(move || f(&grid.thread(b, t)));
            }
        }
    });
}

#[test]
fn lanes_with_one_key_share_values() {
    let full = AtomicU32::new(0);
    run::<32>(1, 40, |t| {
        for round in 0..20_u64 {
            let key = u64::from(t.lane() % 3) + 3 * round;
            let g = t.group(key);
            assert!(g.mask >> t.lane() & 1 == 1);
            assert_eq!(g.size, g.mask.count_ones());
            let sum: u64 = (0..g.size).map(|r| t.shfl64(g, key, r)).sum();
            assert_eq!(sum, u64::from(g.size) * key, "a lane of another key got in");
            let my_rank = t.shfl64(g, u64::from(g.rank), g.rank);
            assert_eq!(my_rank, u64::from(g.rank));
            t.sync(g);
            full.fetch_max(g.size, Ordering::Relaxed);
        }
    });
    assert!(full.into_inner() > 1, "no two lanes ever met");
}

#[test]
fn one_lane_is_a_warp_of_its_own() {
    run::<1>(2, 3, |t| {
        let g = t.group(7);
        assert_eq!((g.size, g.is_leader(), t.shfl64(g, 9, 0)), (1, true, 9));
    });
}

#[test]
fn a_block_waits_for_its_threads_and_hears_thread_0() {
    let counts: Vec<AtomicU32> = (0..2).map(|_| AtomicU32::new(0)).collect();
    run::<1>(2, 5, |t| {
        for round in 0..200 {
            counts[t.block() as usize].fetch_add(1, Ordering::Relaxed);
            let said = t.block_broadcast64(if t.thread() == 0 { 1000 + round } else { 5 });
            assert_eq!(said, 1000 + round);
            assert!(
                u64::from(counts[t.block() as usize].load(Ordering::Relaxed)) >= (round + 1) * 5
            );
            t.block_sync();
        }
    });
}

#[test]
fn ended_threads_do_not_hold_a_barrier() {
    run::<32>(1, 6, |t| {
        if t.thread() < 3 {
            return;
        }
        t.block_sync();
        let g = t.group(1);
        t.sync(g);
    });
}

#[test]
fn abort_opens_a_barrier() {
    let abort = Arc::new(AtomicBool::new(false));
    let grid = HostGrid::<1>::new(
        1,
        2,
        Hooks {
            gave_up: None,
            relax: None,
            abort: Arc::clone(&abort),
        },
    );
    let waiting = grid.thread(0, 0);
    let other = grid.thread(0, 1);
    std::thread::scope(|s| {
        s.spawn(move || {
            let t = &waiting;
            t.block_sync();
            assert!(t.aborted());
        });
        abort.store(true, Ordering::Relaxed);
    });
    drop(other);
}
