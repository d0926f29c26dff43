//! The wire between the two processes of a run: JSON messages, over the standard input and output of a process that this
//! one started, or over a connection to a process that somebody else did (`doorbell serve`, a launcher's rank 1).
//!
//! A started process learns of its parent's death by the end of its input, the parent of the peer's by the end of its
//! output, both at once; a connection ends likewise. Every wait has a deadline too.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use doorbell::{Channel, ConnectError, Device, Listener, limits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::far::Order;
use super::patience::Patience;
use super::peer::{Turn, beginning, wait_driving};
use super::running::DEADLINE;
use crate::units::span;

/// What a process that this one started gets to end: after a goodbye, and after a run that failed, whose time was up before.
const GOING: Duration = Duration::from_secs(3);
const CUT_SHORT: Duration = Duration::from_millis(700);

/// A sign of life that came since then is of now: there are ten a second.
const NOW: Duration = Duration::from_millis(300);

/// How often a wait for the peer looks whether it has answered instead.
const SLICE: Duration = Duration::from_millis(20);

/// Both sides of the shared memory link are connected within so long of each other, or one could not be.
const CONNECTED: Duration = Duration::from_millis(500);

/// An answer of the peer: what was asked for, or why not.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer<T> {
    Ok(T),
    Err(String),
    /// It takes a while, and goes on: the answer is still to come.
    Working,
}

/// The peer process, as the initiator sees it.
pub(crate) struct Partner {
    wire: Wire,
    timeout: Duration,
    /// Sessions of the shared memory link, by the id of our HCA.
    sessions: Vec<(u64, doorbell::Peer)>,
    /// The device whose engine nobody else runs while an answer is waited for: the peer may owe its own to what that engine still has to
    /// acknowledge.
    driven: Option<Device>,
}

enum Wire {
    Child(Started),
    Channel(Box<Channel>),
}

/// A process that this one started.
struct Started {
    child: Child,
    input: Option<ChildStdin>,
    /// It was told that the run is over: it goes by itself.
    parted: bool,
    /// It was killed, since it did not answer in time.
    given_up: bool,
    lines: Receiver<std::io::Result<String>>,
    /// The next of them, if it was looked for and was there.
    line: Option<std::io::Result<String>>,
}

impl Partner {
    /// Starts this very executable with `args`, and variables beside the inherited ones.
    pub(crate) fn start(
        args: &[std::ffi::OsString],
        env: &[(&str, String)],
        timeout: Duration,
    ) -> Result<Self> {
        let exe =
            std::env::current_exe().context("finding this command's own file to start the peer")?;
        let mut command = Command::new(&exe);
        command
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)));
        Self::of(command, timeout)
    }

    /// Starts the process of `command`, which takes orders.
    fn of(mut command: Command, timeout: Duration) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(limits::thread)
            .with_context(|| {
                format!(
                    "starting the peer process {}",
                    command.get_program().display()
                )
            })?;
        let input = child.stdin.take();
        if let Some(input) = &input {
            // An order may be longer than a pipe is, and a process that is stopped reads none.
            let flags = fcntl_getfl(input).context("looking at the peer's input")?;
            fcntl_setfl(input, flags | OFlags::NONBLOCK).context("opening the peer's input")?;
        }
        let output = child
            .stdout
            .take()
            .context("the peer's output is missing")?;
        let (send, lines) = channel();
        std::thread::Builder::new()
            .name("peer-reader".to_owned())
            .spawn(move || {
                for line in BufReader::new(output).lines() {
                    if send.send(line).is_err() {
                        return;
                    }
                }
            })
            .map_err(limits::thread)
            .context("starting the thread that reads from the peer")?;
        let wire = Wire::Child(Started {
            child,
            input,
            parted: false,
            given_up: false,
            lines,
            line: None,
        });
        Ok(Self::new(wire, timeout))
    }

    /// A process that somebody else started and that takes orders.
    pub(crate) fn over(channel: Channel, timeout: Duration) -> Self {
        Self::new(Wire::Channel(Box::new(channel)), timeout)
    }

    fn new(wire: Wire, timeout: Duration) -> Self {
        Self {
            wire,
            timeout,
            sessions: Vec::new(),
            driven: None,
        }
    }

    /// The run goes on with this device.
    pub(crate) fn works_with(&mut self, device: &Device) {
        self.driven = device.is_caller_driven().then(|| device.clone());
    }

    /// The session of the shared memory link between `device` and the peer, and its number.
    pub(crate) fn session(&mut self, device: &doorbell::Device) -> Result<(doorbell::Peer, u32)> {
        let id = device.provider().id();
        if let Some(at) = self.sessions.iter().position(|(hca, _)| *hca == id) {
            return Ok((self.sessions[at].1.clone(), at as u32));
        }
        let session = self.sessions.len() as u32;
        // A name in the abstract name space leaves nothing behind.
        let address = format!("@doorbell-perf-{}-{id:016x}", std::process::id());
        let listener = device.listen(&address)?;
        self.send(&Order::Dial { session, address })?;
        let peer = self.come(&listener)?;
        self.sessions.push((id, peer.clone()));
        Ok((peer, session))
    }

    /// The peer, which was told to dial.
    fn come(&mut self, listener: &Listener) -> Result<doorbell::Peer> {
        const WHAT: &str = "connect over shared memory";
        let start = Instant::now();
        let mut answered: Option<Instant> = None;
        let peer = loop {
            let left = self.timeout.saturating_sub(start.elapsed());
            let (asked, slice) = (Instant::now(), left.min(SLICE));
            match listener.accept(slice) {
                Ok(peer) => break peer,
                Err(e) if left.is_zero() || asked.elapsed() < slice => return Err(e.into()),
                // Who could not dial says so, and does not come any more.
                Err(_) if answered.is_none() && self.wire.wait(Duration::ZERO) => {
                    let outcome = self.answer::<()>(WHAT);
                    outcome.map_err(|e| match listener.trouble() {
                        Some(here) if !e.to_string().contains(&here) => {
                            anyhow!("{e}; here: {here}")
                        }
                        _ => e,
                    })?;
                    answered = Some(Instant::now());
                }
                // It was connected, and is no more: this side could not.
                Err(_) if answered.is_some_and(|at| at.elapsed() > CONNECTED) => {
                    if let Some(here) = listener.trouble() {
                        bail!("this process could not {WHAT}: {here}");
                    }
                }
                Err(_) => {}
            }
        };
        if answered.is_none() {
            self.answer::<()>(WHAT)?;
        }
        Ok(peer)
    }

    /// Sends a question without waiting for its answer.
    pub(crate) fn send<Q: Serialize>(&mut self, question: &Q) -> Result<()> {
        let mut line = serde_json::to_vec(question).context("writing to the peer")?;
        match &mut self.wire {
            Wire::Channel(channel) => {
                let sent = channel.send(&line, self.timeout);
                sent.map_err(|e| ended(e, "when it was asked"))
            }
            Wire::Child(started) => {
                line.push(b'\n');
                started.write(&line, self.timeout)
            }
        }
    }

    /// Waits for an answer to what was sent, while the other side says that it works, or has no CPU to.
    pub(crate) fn answer<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        let mut patience = Patience::new(self.timeout);
        let began = Instant::now();
        loop {
            if !self.wait(patience.slice()) {
                match &self.wire {
                    // A silence that began before this was asked counts too.
                    Wire::Channel(channel) => match channel.trouble(self.timeout) {
                        Some(trouble) => {
                            return Err(ended(trouble, &format!("when asked to {what}")));
                        }
                        None if !patience.over(&[std::process::id()]) => continue,
                        None => {}
                    },
                    Wire::Child(started) => {
                        if !patience.over(&[std::process::id(), started.child.id()]) {
                            continue;
                        }
                    }
                }
            }
            let line = self.wire.take(what, self.timeout)?;
            match serde_json::from_slice(&line) {
                Ok(Answer::Working) => {
                    ensure!(
                        began.elapsed() < DEADLINE,
                        "the peer process did not {what} within {}, although it said that it works",
                        span(DEADLINE)
                    );
                    patience.restart();
                }
                Ok(Answer::Ok(answer)) => return Ok(answer),
                Ok(Answer::Err(reason)) => bail!("the peer process could not {what}: {reason}"),
                Err(e) => bail!(
                    "the peer process answered {:?} when asked to {what}: {e}",
                    beginning(&line)
                ),
            }
        }
    }

    /// Waits until something can be taken, and runs the engine meanwhile if nobody else does.
    fn wait(&mut self, time: Duration) -> bool {
        let Some(device) = &self.driven else {
            return self.wire.wait(time);
        };
        let wire = RefCell::new(&mut self.wire);
        let there = |time| wire.borrow_mut().wait(time);
        wait_driving(&mut || Turn::of(device), time, there)
    }

    /// Asks and waits.
    pub(crate) fn ask<Q: Serialize, T: DeserializeOwned>(
        &mut self,
        what: &str,
        question: &Q,
    ) -> Result<T> {
        self.send(question)?;
        self.answer(what)
    }

    /// Is it still there? An error says how it ended, or for how long nothing was heard of it, if that is more than `patience`.
    pub(crate) fn alive(&mut self, patience: Duration) -> Result<()> {
        match &mut self.wire {
            Wire::Child(started) => started.alive(),
            Wire::Channel(channel) => match channel.trouble(patience) {
                Some(trouble) => Err(ended(trouble, "in mid-run")),
                None => Ok(()),
            },
        }
    }

    /// As [`alive`](Partner::alive), without patience for silence, of a run that has failed: what the peer says of its end travels beside the
    /// packets that fail by it, and may come a moment later.
    pub(crate) fn last_word(&mut self) -> Result<()> {
        for _ in 0..10 {
            self.alive(Duration::ZERO)?;
            if let Wire::Child(started) = &self.wire {
                let pid = started.child.id();
                if doorbell::report::is_stopped(pid) {
                    bail!("the peer process (pid {pid}) is stopped (SIGSTOP, or a debugger)");
                }
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Who it is and when it was heard of last, for errors of the link to it; nothing of a process that this one started.
    pub(crate) fn heard(&self) -> Option<String> {
        let Wire::Channel(channel) = &self.wire else {
            return None;
        };
        let (peer, silence) = (channel.peer(), channel.silence());
        Some(match silence < NOW {
            true => format!(
                "the peer process at {peer} gives signs of life, so only packets do not pass"
            ),
            false => format!(
                "the peer process at {peer} gave its last sign of life {} ago",
                span(silence)
            ),
        })
    }

    /// The run cannot go on: the peer is told why, if there is a way to.
    pub(crate) fn give_up(self, why: &str) {
        match self.wire {
            Wire::Channel(channel) => channel.end(why),
            // The end of its input tells it.
            Wire::Child(started) => drop(started),
        }
    }

    /// Who it is and what was negotiated with it, where somebody else started it.
    pub(crate) fn negotiated(&self) -> Vec<String> {
        match &self.wire {
            Wire::Child(_) => Vec::new(),
            Wire::Channel(c) => super::remote::negotiated(c.introduction(), c.agreed()),
        }
    }

    /// The run is over: the peer may go, and end as `well` says.
    pub(crate) fn part(&mut self, well: bool) -> Result<()> {
        let () = self.ask("part", &Order::Goodbye { well })?;
        if let Wire::Child(started) = &mut self.wire {
            started.parted = true;
        }
        Ok(())
    }
}

/// How the peer ended, in the words of a run. Whoever explains an error that is this one adds nothing about the peer.
#[derive(Debug)]
pub(crate) struct PeerEnd(String);

impl std::fmt::Display for PeerEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PeerEnd {}

/// The end of a connection, in the words of a run.
fn ended(error: ConnectError, when: &str) -> anyhow::Error {
    let words = match error {
        ConnectError::Lost { peer, reason, .. } => {
            format!("the peer process at {peer} died {when}: {reason}")
        }
        ConnectError::Ended { peer, reason } => {
            format!("the peer process at {peer} ended the run: {reason}")
        }
        ConnectError::Silent { .. } => format!("the peer process at {error}"),
        other => return other.into(),
    };
    PeerEnd(words).into()
}

impl Wire {
    /// The next message, which is there; or why there is none after `patience`.
    fn take(&mut self, what: &str, patience: Duration) -> Result<Vec<u8>> {
        match self {
            Self::Child(started) => started.line(what, patience),
            Self::Channel(channel) => channel.recv(Duration::ZERO).map_err(|e| match e {
                ConnectError::TimedOut { peer, remedy, .. } => anyhow!(
                    "the peer process at {peer} did not {what} within {}; {remedy}",
                    span(patience)
                ),
                other => ended(other, &format!("when asked to {what}")),
            }),
        }
    }

    /// Waits until there is an answer, or none will come.
    fn wait(&mut self, time: Duration) -> bool {
        match self {
            Self::Channel(channel) => channel.wait(time),
            // Looked for before, and not taken yet.
            Self::Child(started) if started.line.is_some() => true,
            Self::Child(started) => match started.lines.recv_timeout(time) {
                Ok(line) => {
                    started.line = Some(line);
                    true
                }
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            },
        }
    }
}

impl Started {
    /// All of `line`, as long as somebody takes of it.
    fn write(&mut self, mut line: &[u8], timeout: Duration) -> Result<()> {
        let mut patience = Patience::new(timeout);
        while !line.is_empty() {
            let Some(input) = &mut self.input else {
                bail!("the peer's input is closed already");
            };
            match input.write(line) {
                Ok(n @ 1..) => {
                    line = &line[n..];
                    patience.restart();
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    writable(input, patience.slice());
                    if patience.over(&[std::process::id(), self.child.id()]) {
                        return Err(self.late("take an order", timeout));
                    }
                }
                Ok(_) | Err(_) => return Err(self.death("while it was being asked")),
            }
        }
        Ok(())
    }

    /// It did not do something in time, and is ended.
    fn late(&mut self, what: &str, patience: Duration) -> anyhow::Error {
        let pid = self.child.id();
        let why = match doorbell::report::is_stopped(pid) {
            true => "it is stopped (SIGSTOP, or a debugger)",
            false => "raise --timeout if the machine is that slow",
        };
        // What it has of ours would be waited for when the run is closed, in vain.
        self.given_up = true;
        let _ = self.child.kill();
        anyhow!(
            "the peer process (pid {pid}) did not {what} within {}; {why}",
            span(patience)
        )
    }

    fn line(&mut self, what: &str, patience: Duration) -> Result<Vec<u8>> {
        let line = match self.line.take() {
            Some(line) => Ok(line),
            None => self.lines.recv_timeout(Duration::ZERO),
        };
        match line {
            Ok(Ok(line)) => Ok(line.into_bytes()),
            Ok(Err(e)) => Err(e).with_context(|| format!("reading the peer's answer to {what}")),
            Err(RecvTimeoutError::Timeout) => Err(self.late(what, patience)),
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.death(&format!("when asked to {what}")))
            }
        }
    }

    fn alive(&mut self) -> Result<()> {
        // How it ends then is this process's doing.
        if self.given_up {
            return Ok(());
        }
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            _ => Err(self.death("in mid-run")),
        }
    }

    fn death(&mut self, when: &str) -> anyhow::Error {
        let pid = self.child.id();
        let until = Instant::now() + Duration::from_secs(1);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    let words = format!("the peer process (pid {pid}) died {when}: {status}");
                    return PeerEnd(words).into();
                }
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                _ => {
                    let words = format!("the peer process (pid {pid}) closed its output {when}");
                    return PeerEnd(words).into();
                }
            }
        }
    }
}

/// Waits so long at most until something can be written.
fn writable(fd: &impl AsFd, time: Duration) {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    let time = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    // An error means that writing will say what it is.
    let _ = poll(&mut fds, Some(&time));
}

impl Drop for Started {
    /// The end of its input tells the peer to go; one that does not is killed.
    fn drop(&mut self) {
        drop(self.input.take());
        let until = Instant::now()
            + match self.parted {
                true => GOING,
                false => CUT_SHORT,
            };
        while Instant::now() < until {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                _ => return,
            }
        }
        // Its exit status is of no interest any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use doorbell::{Acceptor, Greeting, Line};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(1);

    /// Both ends of a connection within this process.
    fn connection() -> (Channel, Channel) {
        let acceptor = Acceptor::bind(Some("127.0.0.1:0")).expect("a port");
        let at = acceptor.address().to_string();
        let far = std::thread::spawn(move || {
            let line = acceptor.accept(TIMEOUT * 10).expect("somebody");
            let line = line.expect("a connection");
            line.answer(&Greeting::default(), TIMEOUT * 10)
        });
        let line = Line::dial(&at, TIMEOUT * 10).expect("it listens");
        let near = line.call(&Greeting::default(), TIMEOUT * 10);
        let far = far.join().expect("no panic").expect("a greeting");
        (near.expect("a welcome"), far)
    }

    fn say(channel: &mut Channel, answer: &Answer<u32>) {
        let words = serde_json::to_vec(answer).expect("JSON");
        channel.send(&words, TIMEOUT).expect("sent");
    }

    #[test]
    fn a_process_that_takes_no_orders_is_given_up() {
        // More than a pipe takes.
        let order = Order::Connect {
            over: crate::perf::far::Over::Roce,
            depth: 1,
            receives: 0,
            endpoints: vec![vec![0; 1 << 20]],
        };
        let start = |program: &str, args: &[&str]| {
            let mut command = Command::new(program);
            command.args(args);
            Partner::of(command, TIMEOUT).expect("a process")
        };
        let mut deaf = start("sleep", &["30"]);
        let words = crate::words(&deaf.send(&order).expect_err("nobody reads it"));
        assert!(
            words.contains("did not take an order within 1.00 s"),
            "{words}"
        );
        // That it is dead now is this side's doing, and no news.
        assert!(deaf.last_word().is_ok());
        let mut gone = start("true", &[]);
        let words = crate::words(&gone.send(&order).expect_err("nobody is there"));
        assert!(words.contains("died while it was being asked"), "{words}");
        let mut reads = start("sh", &["-c", "read -r order; echo '{\"Ok\":[]}'"]);
        let answer: Vec<u8> = reads.ask("connect", &order).expect("an answer");
        assert!(answer.is_empty());
    }

    #[test]
    fn who_works_is_waited_for_and_who_says_nothing_is_not() {
        let (near, mut far) = connection();
        let mut partner = Partner::over(near, TIMEOUT);
        let far = std::thread::spawn(move || {
            for _ in 0..12 {
                std::thread::sleep(TIMEOUT / 5);
                say(&mut far, &Answer::Working);
            }
            say(&mut far, &Answer::Ok(7));
            far
        });
        let answer: u32 = partner.answer("count").expect("it worked");
        assert_eq!(answer, 7);
        let mut far = far.join().expect("no panic");
        // It gives signs of life, and does nothing.
        let silent = partner.answer::<u32>("count").expect_err("no answer");
        let words = crate::words(&silent);
        assert!(words.contains("did not count within 1.00 s"), "{words}");
        // Half a megabyte of what is no answer.
        far.send(&vec![b'x'; 1 << 19], TIMEOUT).expect("sent");
        let odd = partner.answer::<u32>("count").expect_err("no answer");
        assert!(crate::words(&odd).len() < 1000);
        far.end("of a test");
        let ended = partner.answer::<u32>("count").expect_err("its end");
        let words = crate::words(&ended);
        assert!(words.contains("ended the run: of a test"), "{words}");
    }
}
