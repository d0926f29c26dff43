//! Ranks as threads: collectives, missing and dying ranks, garbage.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use super::frame::{HEADER, MAGIC, pack, unpack};
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
fn who_finds_no_rank_0_says_where_it_looked_and_what_the_system_said() {
    let soon = Duration::from_millis(50);
    let tcp = Rendezvous::Tcp("127.0.0.1:1".to_owned());
    let (_dir, unix) = unix();
    for (at, parts) in [
        (tcp, ["tcp:127.0.0.1:1", "refused"]),
        (unix, ["unix:", "No such file"]),
    ] {
        let text = Bootstrap::join(&at, 1, 2, soon).unwrap_err().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
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
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut bytes = [0u8; HEADER];
    bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[4] = 9;
    s.write_all(&bytes).unwrap();
    let mut answer = Vec::new();
    s.read_to_end(&mut answer).unwrap();
    let text = String::from_utf8_lossy(&answer[HEADER..]);
    assert!(
        text.contains("version 9") && text.contains("version 3"),
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

/// Three ranks that meet at rank 0's place, each with what it opened before it knew its rank.
fn met(secret: &'static [u8]) -> Vec<Bootstrap> {
    let places: [Rendezvous; 2] = [
        Rendezvous::Unix(format!("@doorbell-test-{:016x}", rand::random::<u64>()).into()),
        "tcp:127.0.0.1:0".parse().unwrap(),
    ];
    let meeting = Meeting::open(&places).unwrap();
    let at = meeting.addresses().to_vec();
    assert_eq!(at[0], places[0]);
    assert_ne!(at[1], places[1], "the port that was chosen");
    let time = Duration::from_secs(20);
    let leaves: Vec<_> = [(1, at.clone()), (2, at[1..].to_vec())]
        .into_iter()
        .map(|(rank, at)| {
            std::thread::spawn(move || Bootstrap::attend(&at, secret, rank, 3, time).unwrap())
        })
        .collect();
    let mut all = vec![Bootstrap::preside(&meeting, secret, 3, time).unwrap()];
    all.extend(leaves.into_iter().map(|l| l.join().unwrap()));
    all
}

/// Looks until there is an error.
fn noticed(b: &mut Bootstrap) -> BootstrapError {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Err(e) = b.watch() {
            return e;
        }
        assert!(Instant::now() < deadline, "nothing was noticed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_meet_where_the_first_one_listened_already() {
    let threads: Vec<_> = met(b"a secret")
        .into_iter()
        .map(|b| std::thread::spawn(move || collectives(Ok(b))))
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// A place that was open before it was told of is not waited for when it is closed; one that is yet to be opened is.
#[test]
fn who_comes_when_rank_0_has_given_up_is_told_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let unix = Rendezvous::Unix(dir.path().join("meet"));
    let meeting = Meeting::open(&[unix, Rendezvous::Tcp("127.0.0.1:0".into())]).unwrap();
    let mut at = meeting.addresses().to_vec();
    drop(meeting);
    // The name of a file that is there no more is none that refuses.
    at.remove(0);
    let begin = Instant::now();
    let error = Bootstrap::attend(&at, b"secret", 1, 2, Duration::from_secs(60)).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(30), "{begin:?}");
    assert!(error.to_string().contains("any more"), "{error}");
    let error = Bootstrap::join(&at[0], 1, 2, Duration::from_millis(50)).unwrap_err();
    assert!(
        matches!(error, BootstrapError::Unreachable { .. }),
        "{error}"
    );
}

#[test]
fn who_does_not_know_the_secret_gets_no_seat() {
    let meeting = Meeting::open(&["tcp:127.0.0.1:0".parse().unwrap()]).unwrap();
    let at = meeting.addresses().to_vec();
    let stranger = std::thread::spawn(move || {
        Bootstrap::attend(&at, b"guess", 1, 2, Duration::from_secs(10)).unwrap_err()
    });
    let hub = Bootstrap::preside(&meeting, b"secret", 2, Duration::from_millis(600)).unwrap_err();
    assert!(hub.to_string().contains("[1]"), "{hub}");
    let text = stranger.join().unwrap().to_string();
    assert!(text.contains("another job"), "{text}");
}

/// More of them than a time-out of a second each leaves room for, and more than there are chairs.
#[test]
fn silent_strangers_keep_no_rank_out() {
    let meeting = Meeting::open(&["tcp:127.0.0.1:0".parse().unwrap()]).unwrap();
    let at = meeting.addresses().to_vec();
    let Rendezvous::Tcp(place) = at[0].clone() else {
        unreachable!()
    };
    let strangers: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(&place).unwrap())
        .collect();
    let time = Duration::from_secs(20);
    let leaf =
        std::thread::spawn(move || Bootstrap::attend(&at, b"secret", 1, 2, time).map(|b| b.rank()));
    let hub = Bootstrap::preside(&meeting, b"secret", 2, time);
    assert_eq!(leaf.join().unwrap().unwrap(), 1);
    hub.unwrap();
    drop(strangers);
}

#[test]
fn who_says_nothing_is_told_so() {
    let meeting = Meeting::open(&["tcp:127.0.0.1:0".parse().unwrap()]).unwrap();
    let Rendezvous::Tcp(place) = meeting.addresses()[0].clone() else {
        unreachable!()
    };
    let mut stranger = TcpStream::connect(&place).unwrap();
    let time = Duration::from_millis(2500);
    let hub = std::thread::spawn(move || Bootstrap::preside(&meeting, b"secret", 2, time));
    let mut answer = Vec::new();
    stranger.read_to_end(&mut answer).unwrap();
    let text = String::from_utf8_lossy(&answer[HEADER..]);
    assert!(text.contains("no greeting within 1s"), "{text}");
    assert!(hub.join().unwrap().is_err());
}

#[test]
fn a_death_between_collectives_reaches_everybody_and_a_goodbye_is_none() {
    let mut all = met(b"");
    all.iter_mut().for_each(|b| b.watch().unwrap());
    drop(all.remove(1));
    let text = noticed(&mut all[0]).to_string();
    assert!(text.contains("lost rank 1"), "{text}");
    let text = noticed(&mut all[1]).to_string();
    assert!(text.contains("lost rank 1"), "{text}");
    assert!(all[0].watch().is_ok(), "once");
    drop(all.remove(0));
    assert!(noticed(&mut all[0]).to_string().contains("lost rank 0"));

    let mut all = met(b"");
    all.remove(2).leave();
    let deadline = Instant::now() + Duration::from_secs(10);
    while all[0].left().next().is_none() {
        all[0].watch().unwrap();
        assert!(Instant::now() < deadline);
    }
    assert_eq!(all[0].left().collect::<Vec<_>>(), [2]);
    all.remove(0).leave();
    while all[0].left().next().is_none() {
        all[0].watch().unwrap();
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn a_rank_that_fails_between_collectives_tells_everybody_why() {
    for who in 0..3 {
        let mut all = met(b"");
        all[who].fail("a copy went wrong");
        for (rank, one) in all.iter_mut().enumerate() {
            if rank == who {
                one.watch().expect("it knows");
                continue;
            }
            let text = noticed(one).to_string();
            assert!(text.contains("a copy went wrong"), "{text}");
            assert!(text.contains(&format!("rank {who}")), "{text}");
            one.watch().expect("once");
        }
        // It has not left: its end is still noticed by rank 0, and by all if it is rank 0.
        drop(all.remove(who));
        let text = noticed(&mut all[0]).to_string();
        assert!(text.contains(&format!("lost rank {who}")), "{text}");
    }
}

/// Does every rank's work, each on a thread of its own.
fn together<T: Send>(all: Vec<Bootstrap>, body: impl Fn(Bootstrap) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = all
            .into_iter()
            .map(|b| scope.spawn(move || body(b)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn who_waits_in_a_collective_hears_of_a_failure_at_once() {
    for who in 0..3 {
        // The time-out is 20 s: all of it must end long before.
        let begin = Instant::now();
        let texts = together(met(b""), |mut b| {
            if b.rank() == who {
                std::thread::sleep(Duration::from_millis(100));
                b.fail("a copy went wrong");
                // It stays: that it ends is not how the others know.
                std::thread::sleep(Duration::from_secs(1));
                return None;
            }
            let error = b.barrier().expect_err("nobody waits for who has failed");
            assert!(begin.elapsed() < Duration::from_secs(10), "{error}");
            let again = b.barrier().expect_err("it stays so").to_string();
            assert_eq!(again, error.to_string());
            Some(again)
        });
        for text in texts.into_iter().flatten() {
            assert!(text.contains("a copy went wrong"), "{text}");
            assert!(text.contains(&format!("rank {who}")), "{text}");
        }
    }
}

#[test]
fn who_fails_in_a_collective_tells_the_others_and_ends_it_for_itself() {
    for who in 0..3 {
        let texts = together(met(b""), |mut b| {
            if (b.rank() + 1) % 3 == who {
                // It never comes to the collective, and hears of it all the same.
                return noticed(&mut b).to_string();
            }
            let failing = b.rank() == who;
            let gathered =
                b.all_gather_while(&[], &mut || failing.then(|| "an engine died".to_owned()));
            gathered.expect_err("one has failed").to_string()
        });
        for text in texts {
            assert!(text.contains("an engine died"), "{text}");
            assert!(text.contains(&format!("rank {who}")), "{text}");
        }
    }
}

#[test]
fn a_failure_behind_what_nobody_has_read_is_seen() {
    let mut all = met(b"");
    let (mut two, mut one, mut zero) = (all.remove(2), all.remove(1), all.remove(0));
    std::thread::scope(|scope| {
        // Rank 1 gives its part, and fails while it waits for the others: rank 0 looks at that connection only between collectives.
        let begin = Instant::now();
        scope.spawn(move || {
            let late = || begin.elapsed() > Duration::from_millis(200);
            let error = one.all_gather_while(&[7; 100], &mut || {
                late().then(|| "its engine stands still".to_owned())
            });
            error.expect_err("it has failed");
        });
        for other in [&mut zero, &mut two] {
            let text = noticed(other).to_string();
            assert!(text.contains("rank 1 has failed: its engine"), "{text}");
        }
    });
}

#[test]
fn who_stops_saying_that_it_lives_is_missed_and_only_then() {
    std::thread::scope(|scope| {
        for who in [0, 1] {
            scope.spawn(move || misses(who));
        }
    });
}

fn misses(who: u32) {
    let silence = Duration::from_millis(1500);
    let texts = together(met(b""), |mut b| {
        b.keep_alive(silence);
        let begin = Instant::now();
        // Slow steps are none of that: rank 2 comes late, and the others wait longer than the silence.
        while b.rank() == 2 && begin.elapsed() < silence * 2 {
            b.watch().expect("all are well");
            std::thread::sleep(Duration::from_millis(10));
        }
        b.barrier().expect("all are well");
        if b.rank() == who {
            // It blames nobody for the time that it sleeps, and learns what the others think of it.
            std::thread::sleep(silence * 3);
        }
        noticed(&mut b).to_string()
    });
    let says = format!("rank {who} has not been heard of for");
    for (rank, text) in (0u32..).zip(texts) {
        // Rank 0 is told what the others say of it, too.
        assert!(text.contains(&says), "{rank}: {text}");
    }
}

#[test]
fn who_never_said_that_it_lives_is_not_missed() {
    let silence = Duration::from_millis(200);
    together(met(b""), |mut b| {
        if b.rank() > 0 {
            b.keep_alive(silence);
        }
        // Rank 0 does not take part: nobody misses it, nor it anybody.
        let begin = Instant::now();
        while begin.elapsed() < silence * 5 {
            if b.rank() > 0 {
                b.watch().expect("rank 0 never said so");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        b.barrier().expect("all are well");
    });
}

#[test]
fn who_does_not_take_a_long_answer_keeps_it_from_nobody_and_is_named() {
    let silence = Duration::from_millis(1500);
    // Longer than any socket holds.
    let long = vec![7; 16 << 20];
    let texts = together(met(b""), |mut b| {
        b.keep_alive(silence);
        let mut stands = b.rank() == 1;
        let part: &[u8] = if b.rank() == 2 { &long } else { &[] };
        let gathered = b.all_gather_while(part, &mut || {
            if std::mem::take(&mut stands) {
                // It has given its part.
                std::thread::sleep(silence * 4);
            }
            None
        });
        if b.rank() == 2 {
            let gathered = gathered.expect("an answer, though rank 1 takes none");
            assert_eq!(gathered[2].len(), long.len());
            return noticed(&mut b).to_string();
        }
        let text = match gathered {
            Err(e) => e.to_string(),
            Ok(_) => noticed(&mut b).to_string(),
        };
        // What is left for rank 1 is written to its end, and then what rank 0 thinks of it.
        let begin = Instant::now();
        while b.rank() == 0 && begin.elapsed() < silence * 5 {
            let _ = b.watch();
            std::thread::sleep(Duration::from_millis(10));
        }
        text
    });
    for (rank, text) in texts.iter().enumerate() {
        let says = "rank 1 has not been heard of for";
        assert!(text.contains(says), "{rank}: {text}");
        assert!(rank == 0 || text.contains("rank 0 gave up"), "{text}");
    }
}
