//! Ranks as threads: collectives, missing and dying ranks, garbage.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;

use super::frame::{HEADER, MAGIC};
use super::*;

fn unix() -> (tempfile::TempDir, Rendezvous) {
    let dir = tempfile::tempdir().unwrap();
    let at = Rendezvous::Unix(dir.path().join("meet"));
    (dir, at)
}

fn ranks<T: Send + 'static>(
    at: &Rendezvous,
    world: u32,
    timeout: Duration,
    body: fn(Result<Bootstrap>) -> T,
) -> Vec<T> {
    let threads: Vec<_> = (0..world)
        .map(|rank| {
            let at = at.clone();
            std::thread::spawn(move || body(Bootstrap::join(&at, rank, world, timeout)))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

fn collectives(joined: Result<Bootstrap>) {
    let mut b = joined.unwrap();
    let me = b.rank();
    let gathered = b.all_gather(format!("from {me}").as_bytes()).unwrap();
    for (i, blob) in gathered.iter().enumerate() {
        assert_eq!(blob, format!("from {i}").as_bytes());
    }
    let out: Vec<Vec<u8>> = (0..b.world()).map(|to| vec![me as u8, to as u8]).collect();
    for (from, blob) in b.all_to_all(&out).unwrap().iter().enumerate() {
        assert_eq!(blob, &[from as u8, me as u8]);
    }
    b.barrier().unwrap();
}

#[test]
fn four_ranks_over_a_unix_socket() {
    let (_dir, at) = unix();
    ranks(&at, 4, Duration::from_secs(20), collectives);
}

#[test]
fn three_ranks_over_tcp_and_one_alone() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let at: Rendezvous = format!("tcp:127.0.0.1:{port}").parse().unwrap();
    ranks(&at, 3, Duration::from_secs(20), collectives);
    ranks(&at, 1, Duration::from_secs(20), collectives);
}

#[test]
fn missing_ranks_are_named_to_everyone() {
    let (_dir, at) = unix();
    let at1 = at.clone();
    let one = std::thread::spawn(move || Bootstrap::join(&at1, 1, 4, Duration::from_secs(20)));
    let zero = Bootstrap::join(&at, 0, 4, Duration::from_millis(300));
    match zero {
        Err(BootstrapError::Missing { missing, .. }) => {
            assert!(missing.ends_with(&[2, 3]), "{missing:?}")
        }
        other => panic!("{other:?}"),
    }
    // Rank 1 either was heard and told, or finds nobody listening any more and names rank 0.
    let text = one.join().unwrap().unwrap_err().to_string();
    assert!(text.contains("[2, 3]") || text.contains("rank 0"), "{text}");
}

#[test]
fn a_rank_that_dies_is_named() {
    let (_dir, at) = unix();
    let errors = ranks(&at, 3, Duration::from_secs(20), |joined| {
        let mut b = joined.unwrap();
        if b.rank() == 2 {
            return None;
        }
        Some(b.barrier().unwrap_err().to_string())
    });
    for e in errors.into_iter().flatten() {
        assert!(e.contains("rank 2"), "{e}");
    }
}

#[test]
fn different_calls_are_noticed() {
    let (_dir, at) = unix();
    let results = ranks(&at, 2, Duration::from_secs(20), |joined| {
        let mut b = joined.unwrap();
        if b.rank() == 1 {
            b.sequence += 1;
        }
        b.barrier().map_err(|e| e.to_string())
    });
    for r in results {
        assert!(r.unwrap_err().contains("same calls"));
    }
}

#[test]
fn other_versions_and_garbage_are_refused_by_name() {
    let (_dir, at) = unix();
    let Rendezvous::Unix(path) = at.clone() else {
        unreachable!()
    };
    let hub = std::thread::spawn(move || Bootstrap::join(&at, 0, 2, Duration::from_millis(1500)));
    let mut s = loop {
        if let Ok(s) = UnixStream::connect(&path) {
            break s;
        }
        std::thread::sleep(RETRY);
    };
    let mut bytes = [0u8; HEADER];
    bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[4] = 9;
    s.write_all(&bytes).unwrap();
    let mut answer = Vec::new();
    s.read_to_end(&mut answer).unwrap();
    let text = String::from_utf8_lossy(&answer[HEADER..]);
    assert!(
        text.contains("version 9") && text.contains("version 1"),
        "{text}"
    );
    assert!(hub.join().unwrap().is_err());
}

#[test]
fn lists_round_trip_and_broken_lists_are_refused() {
    let list: Vec<&[u8]> = vec![b"a", b"", b"ccc"];
    let packed = pack(&list);
    assert_eq!(unpack(&packed, 0).unwrap(), list);
    for cut in 0..packed.len() {
        assert!(unpack(&packed[..cut], 0).is_err());
    }
    assert!(unpack(&u32::MAX.to_le_bytes(), 0).is_err());
}

#[test]
fn addresses_parse_and_print() {
    for text in ["unix:/tmp/x", "tcp:host:1"] {
        assert_eq!(text.parse::<Rendezvous>().unwrap().to_string(), text);
    }
    for text in ["", "unix:", "tcp:host", "http://x"] {
        assert!(text.parse::<Rendezvous>().is_err());
    }
    assert!(matches!(
        Bootstrap::join(&"unix:/tmp/x".parse().unwrap(), 2, 2, Duration::ZERO),
        Err(BootstrapError::Rank { .. })
    ));
}
