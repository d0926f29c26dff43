//! Orders that a script gives, to a device of this process.

use std::cell::RefCell;

use super::super::check::{Layout, Picture};
use super::super::end::EndSpec;
use super::work::GOES_ON;
use super::*;

#[test]
fn who_hangs_up_on_a_failure_was_not_ended_by_a_signal() {
    let told = gone(Some("no memory".to_owned()));
    assert_eq!(told, "it went after it was told: no memory");
    assert!(gone(None).starts_with("it went without a word: the run failed there"));
}

#[test]
fn who_waits_takes_no_cpu_from_those_who_run_the_engine() {
    let long = Duration::from_secs(60);
    let mut turns = [
        Turn::Others(LOOK),
        Turn::Others(HOUR),
        Turn::Ours { worked: true },
    ]
    .into_iter();
    let naps = RefCell::new(Vec::new());
    let ready = |nap| {
        naps.borrow_mut().push(nap);
        naps.borrow().len() == 3
    };
    assert!(wait_driving(
        &mut || turns.next().unwrap_or(Turn::Ours { worked: false }),
        long,
        ready
    ));
    assert_eq!(naps.into_inner(), [LOOK, long, Duration::ZERO]);
}

/// Somebody who orders this, one after the other.
struct Script {
    orders: std::vec::IntoIter<Order>,
    answers: Vec<String>,
    /// What each look at whether to go on takes, how many there were, and which is the last.
    look: Duration,
    looks: std::cell::Cell<u32>,
    last: u32,
}

impl Script {
    fn new(orders: Vec<Order>) -> Self {
        Self {
            orders: orders.into_iter(),
            answers: Vec::new(),
            look: Duration::ZERO,
            looks: std::cell::Cell::new(0),
            last: u32::MAX,
        }
    }

    fn play(mut self, bench: &Bench, terms: &Terms) -> Self {
        let parting = session(bench, Duration::from_secs(10), terms, &mut self);
        parting.expect("orders are answered");
        self
    }
}

impl Orders for Script {
    fn next(&mut self, _turn: &mut dyn FnMut() -> Turn) -> Result<Option<Vec<u8>>> {
        let next = self.orders.next();
        Ok(next.map(|order| serde_json::to_vec(&order)).transpose()?)
    }

    fn answer(&mut self, answer: Vec<u8>) -> bool {
        self.answers.push(String::from_utf8(answer).expect("JSON"));
        true
    }

    fn interrupted(&self) -> Result<()> {
        std::thread::sleep(self.look);
        self.looks.set(self.looks.get() + 1);
        ensure!(self.looks.get() < self.last, "it is told to end");
        Ok(())
    }

    fn lost(&self) -> Option<String> {
        None
    }

    fn tell(&self, _why: &str) {}
}

fn bench() -> Rc<Bench> {
    let config = doorbell::Config {
        gpu: Some(doorbell::GpuSelect::Host),
        hca_cores: Some(doorbell::HcaCores::Caller),
        roce: Some("udp://127.0.0.1".to_owned()),
        ..doorbell::Config::default()
    };
    let benches = Benches::new(config, None).and_then(|mut b| b.main());
    benches.expect("a device")
}

fn windows(bytes: u64) -> SideSpec {
    SideSpec {
        layout: Layout::new(1, bytes),
        on_gpu: false,
        shared: false,
        verbs: false,
    }
}

fn end(bytes: u64) -> Order {
    Order::End(EndSpec {
        size: bytes,
        on_gpu: false,
        shared: false,
        verbs: false,
    })
}

#[test]
fn filling_and_comparing_end_with_whoever_ordered_them() {
    let bench = bench();
    let source = Picture::source(1, 1);
    for order in [Order::Paint(source), Order::Verify(source)] {
        let mut script = Script::new(vec![Order::Side(windows(64 << 20)), order]);
        script.last = 3;
        let script = script.play(&bench, &Terms::own());
        // The last of the work, and one by who tells how it ended: 64 pieces were to come.
        assert!(script.looks.get() <= 4, "{}", script.looks.get());
        assert!(
            script.answers[1].contains("told to end"),
            "{:?}",
            script.answers
        );
    }
}

#[test]
fn work_that_takes_a_while_says_that_it_goes_on() {
    let bench = bench();
    let source = Picture::source(1, 1);
    let orders = vec![
        Order::Side(windows(20 << 20)),
        Order::Paint(source),
        Order::Verify(source),
    ];
    let mut script = Script::new(orders);
    script.look = GOES_ON / 4;
    let answers = script.play(&bench, &Terms::own()).answers;
    let working = |a: &&String| *a == "\"Working\"";
    assert!(answers.iter().filter(working).count() >= 4, "{answers:?}");
    let rest: Vec<_> = answers.iter().filter(|a| !working(a)).collect();
    assert_eq!(rest.len(), 3, "{answers:?}");
    assert!(rest[2].contains("\"wrong\":0"), "{answers:?}");
}

/// Several clients of one server; and one that asks again, whose first windows are gone by then.
#[test]
fn memory_is_given_as_far_as_it_goes() {
    let bench = bench();
    let terms = Terms::of_server(10 << 20);
    let other = terms.take(4 << 20).expect("another client's");
    let mut shared = windows(64);
    shared.shared = true;
    let address = "@nobody".to_owned();
    let orders = vec![
        Order::Side(windows(5 << 20)),
        Order::Side(windows(5 << 20)),
        end(1 << 20),
        end(8),
        Order::Side(windows(7 << 20)),
        Order::Clear,
        end(1 << 20),
        Order::Side(shared),
        Order::Dial {
            session: 0,
            address,
        },
        Order::Read {
            offset: 0,
            len: 1 << 40,
        },
    ];
    let answers = Script::new(orders).play(&bench, &terms).answers;
    let refused = |n: usize, part: &str| {
        assert!(
            answers[n].starts_with("{\"Err\"") && answers[n].contains(part),
            "{n}: {answers:?}"
        );
    };
    for n in [2, 4] {
        refused(n, "--memory");
    }
    refused(7, "by packets");
    refused(8, "by packets");
    refused(9, "at a time");
    for n in [0, 1, 3, 5, 6] {
        assert!(answers[n].starts_with("{\"Ok\""), "{n}: {answers:?}");
    }
    drop(other);
    assert!(terms.take(10 << 20).is_ok(), "all of it was given back");
}

/// A kernel uses queue pairs and memory until it has ended, whatever is ordered meanwhile.
#[test]
fn what_a_kernel_uses_stays_until_it_was_waited_for() {
    let (bench, initiator) = (bench(), bench());
    let builder = initiator.pd.qp().depth(64).receive_queue(64);
    let theirs = builder.build().expect("a queue pair");
    let endpoint = theirs.endpoint(LinkKind::Roce, &[]).expect("its words");
    let spec = windows(4096);
    let echo = |places, size, layout| {
        Order::Echo(EchoOrder {
            layout,
            size,
            places,
            every: 0,
            iters: 10,
            deadline_ns: u64::MAX,
        })
    };
    let layout = spec.layout;
    let source = Picture::source(1, 1);
    let orders = vec![
        Order::Side(spec),
        Order::Connect {
            over: Over::Roce,
            depth: 64,
            receives: 64,
            endpoints: vec![endpoint.to_bytes()],
        },
        // Numbers that do not fit.
        echo(0, 8, layout),
        echo(3, 8, layout),
        echo(8, 0, layout),
        echo(1 << 60, 1 << 60, layout),
        echo(8, 4096, layout),
        echo(8, 8, Layout::new(1, 8)),
        // One that does; nobody sends what it waits for.
        echo(8, 8, layout),
        Order::Clear,
        Order::Side(spec),
        end(8),
        Order::Paint(source),
        echo(8, 8, layout),
        Order::Sabotage,
        Order::ClockStart,
        Order::Counters,
        Order::ClockStop,
    ];
    let answers = Script::new(orders).play(&bench, &Terms::own()).answers;
    for (n, answer) in answers.iter().enumerate() {
        let expected = match n {
            2..=7 => "{\"Err\"",
            9..=14 => "{\"Err\":\"an end is being played here",
            _ => "{\"Ok\"",
        };
        assert!(answer.starts_with(expected), "{n}: {answer}");
    }
    assert_eq!(answers.len(), 18);
}

#[test]
fn of_a_message_that_is_none_the_beginning_is_said() {
    assert_eq!(beginning(b" GET / \n"), "GET /");
    let long = beginning(&vec![b'x'; 1 << 20]);
    assert!(
        long.len() < 300 && long.ends_with("(1048576 bytes)"),
        "{long}"
    );
}
