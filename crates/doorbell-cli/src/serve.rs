//! `doorbell serve`: the far side of `perf --connect` over RoCE and verbs and of `hwtest --peer`, for any number of clients.
//!
//! Each client has a thread, a device and a RoCE port of its own, at the address by which it came, so that one client's
//! fault is not another's. Who dials and does not say who it is takes nobody's place, and all together get so much memory and no more. A signal ends the
//! server: who is being served is told so, whatever is being done for it, and nothing stays behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use doorbell::Acceptor;
use doorbell::connect::{Caller, Knock, Refusal, RefusalKind};
use doorbell::{Config, Device, GpuSelect, Setting, Source};

use crate::Ended;
use crate::args::{Link, ServeArgs};
use crate::perf::bench::{Bench, Benches};
use crate::perf::peer::{Parting, session};
use crate::perf::remote::{self, Over, port_at};
use crate::perf::terms::Terms;
use crate::signals;

/// How often the server looks whether it should end.
const SLICE: Duration = Duration::from_millis(50);
/// Threads that tell clients beyond the limit to come later; who comes beyond those is hung up on.
const REFUSING: u32 = 64;

/// What the threads of a server share.
struct Server<'a> {
    args: &'a ServeArgs,
    stop: &'a AtomicBool,
    terms: Terms,
    /// Clients that are being served, and others that are being told to come later.
    served: AtomicU32,
    refused: AtomicU32,
    /// With `--once`, how the client's run ended.
    outcome: Mutex<Option<Result<Ended>>>,
}

/// Listens until a signal comes, or with `--once` until one client was served.
pub(crate) fn run(args: &ServeArgs) -> Result<Ended> {
    let stop = signals::watch()?;
    try_port(args)?;
    let mut acceptor = Acceptor::bind(args.listen.as_deref())?;
    let at = acceptor.address();
    say(&format!(
        "listening on TCP {at}; on the other host: doorbell perf put-bw --link roce --connect HOST:{0} (or --link verbs: an RDMA NIC), or doorbell hwtest --peer HOST:{0}",
        at.port()
    ));
    let server = Server {
        args,
        stop: &stop,
        terms: Terms::of_server(memory(args)),
        served: AtomicU32::new(0),
        refused: AtomicU32::new(0),
        outcome: Mutex::new(None),
    };
    let most = if args.once { 1 } else { args.clients };
    let mut number = 0;
    let mut alone = Instant::now();
    std::thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) && server.outcome().is_none() {
            if server.served.load(Ordering::Relaxed) > 0 {
                alone = Instant::now();
            }
            if let Some(wait) = args.wait.filter(|w| alone.elapsed() > *w) {
                bail!("no client came within {}", crate::units::span(wait));
            }
            let knock = acceptor.next(SLICE).inspect_err(|_| {
                // Nobody can come any more: who is being served ends, too, and is told.
                stop.store(true, Ordering::Relaxed);
            });
            let caller = match knock? {
                None => continue,
                Some(Knock::Stranger(e)) => {
                    say(&e.to_string());
                    continue;
                }
                Some(Knock::Caller(caller)) => caller,
            };
            let server = &server;
            let busy = server.served.load(Ordering::Relaxed) >= most;
            let spawned = match busy {
                true if server.refused.load(Ordering::Relaxed) >= REFUSING => continue,
                true => {
                    let place = Place::take(&server.refused);
                    spawn(scope, move || {
                        let _place = place;
                        caller.refuse(&too_many(most));
                    })
                }
                false => {
                    let place = Place::take(&server.served);
                    number += 1;
                    spawn(scope, move || {
                        server.attend(place, number, || server.client(caller, number));
                    })
                }
            };
            if let Err(e) = spawned {
                say(&format!(
                    "a client was hung up on, since there is no thread for it: {e}: raise `ulimit -u`, or lower --clients"
                ));
            }
        }
        if stop.load(Ordering::Relaxed) {
            say("a signal came: ending");
        }
        Ok::<_, anyhow::Error>(())
    })?;
    let outcome = server.outcome().take();
    outcome.unwrap_or(Ok(Ended::Well))
}

/// One of a number of places, which is free again when this goes, however that comes about.
struct Place<'a>(&'a AtomicU32);

impl<'a> Place<'a> {
    fn take(places: &'a AtomicU32) -> Self {
        places.fetch_add(1, Ordering::Relaxed);
        Self(places)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Starts a thread, if the system has one.
fn spawn<'s>(scope: &'s Scope<'s, '_>, work: impl FnOnce() + Send + 's) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("doorbell-serve".to_owned());
    thread
        .spawn_scoped(scope, work)
        .map(drop)
        .map_err(doorbell::limits::thread)
}

fn too_many(most: u32) -> Refusal {
    let clients = match most {
        1 => "a client".to_owned(),
        n => format!("{n} clients"),
    };
    let text = format!("it serves {clients} already: come later, or raise its --clients");
    Refusal::new(RefusalKind::Busy, text)
}

/// What clients get of this host's memory, together: half of what is there, unless it was said.
fn memory(args: &ServeArgs) -> u64 {
    args.memory.unwrap_or_else(|| {
        let free = crate::environment::memory_available();
        // Where the system does not say: enough for what `perf` asks for by itself.
        free.map_or(1 << 30, |free| free / 2)
    })
}

/// What cannot be used of the settings, and a port that cannot be opened, is said now, not to the first client.
fn try_port(args: &ServeArgs) -> Result<()> {
    let config = crate::config::of(&args.device, args.port.as_deref(), None);
    let settings = config.resolve()?;
    let said = |name| {
        let by = |s: &&Setting| s.name == name && s.source != Source::Default;
        settings.explain().iter().any(|s| by(&s))
    };
    // With a port there are no clients of the other kind.
    let only = args.port.as_deref().map(remote::link_of);
    let roce = said("roce") && only != Some(Link::Verbs);
    let verbs = said("verbs") && only != Some(Link::Roce);
    if !roce && !verbs {
        return Ok(());
    }
    let config = Config {
        gpu: Some(GpuSelect::Host),
        ..config
    };
    let device = Device::builder().config(config).open()?;
    let opened = match (roce, verbs) {
        (true, _) => device.roce_offer().map(drop),
        _ => Ok(()),
    };
    let opened = opened.and_then(|()| match verbs {
        true => device.verbs_describe().map(drop),
        false => Ok(()),
    });
    match &args.port {
        Some(port) => opened.with_context(|| format!("--port {port} cannot be opened")),
        None => Ok(opened?),
    }
}

impl Server<'_> {
    fn outcome(&self) -> std::sync::MutexGuard<'_, Option<Result<Ended>>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a client brings about ends with it, a mistake of ours too: its place is free again, and the others go on.
    fn attend(&self, place: Place<'_>, number: u32, serve: impl FnOnce() -> Result<Option<Ended>>) {
        let outcome = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
            bail!("this server made a mistake, and told it on standard error: please report it")
        });
        // Whoever reads how it ended may come next.
        drop(place);
        self.note(number, outcome);
    }

    /// How a client's run ended: said, or with `--once` this command's own end.
    fn note(&self, number: u32, outcome: Result<Option<Ended>>) {
        match outcome {
            // No client of ours.
            Ok(None) => {}
            Ok(Some(ended)) if self.args.once => *self.outcome() = Some(Ok(ended)),
            Ok(Some(_)) => {}
            Err(e) if self.args.once => {
                *self.outcome() = Some(Err(e.context(format!("client {number}"))));
            }
            Err(e) => say(&format!("client {number}: {}", crate::words(&e))),
        }
    }

    /// Serves one client to its end; `None` if it was none.
    fn client(&self, caller: Caller, number: u32) -> Result<Option<Ended>> {
        let args = self.args;
        let address = caller.peer().to_owned();
        let purpose = caller.introduction().greeting.purpose.clone();
        let at = caller.local_ip();
        let usual = match purpose.ends_with(remote::OVER_VERBS) {
            true => remote::device_at(at),
            false => port_at(at),
        };
        let named = args.port.as_deref();
        let config = crate::config::of(&args.device, named, Some(&usual));
        let bench = match Benches::new(config, None).and_then(|mut b| b.of_peer(&purpose)) {
            Ok(bench) => bench,
            Err(e) => return Err(turned_away(caller, e)),
        };
        let link = remote::link_of(named.unwrap_or(&usual));
        // An RDMA device that cannot be used is told now. Only by this side: who dialled has a moment to greet, in which it opens nothing slow.
        if link == Link::Verbs
            && let Err(e) = bench.device.verbs_describe()
        {
            return Err(turned_away(caller, e.into()));
        }
        let greeting = match remote::greeting(&bench, link, &args.job, "") {
            Ok(greeting) => greeting,
            Err(e) => return Err(turned_away(caller, e)),
        };
        let channel = match caller.welcome(&greeting, args.timeout) {
            Ok(channel) => channel,
            Err(e) => {
                say(&e.to_string());
                return Ok(None);
            }
        };
        say(&format!("client {number} at {address}: {purpose}"));
        for line in remote::negotiated(channel.introduction(), channel.agreed()) {
            say(&format!("client {number}: {line}"));
        }
        let mut orders = Over {
            channel,
            timeout: args.timeout,
            stop: &|| match self.stop.load(Ordering::Relaxed) {
                true => bail!("this server was told to end, by a signal"),
                false => Ok(()),
            },
        };
        serve(&bench, self, number, &mut orders).map(Some)
    }
}

fn serve(
    bench: &Rc<Bench>,
    server: &Server<'_>,
    number: u32,
    orders: &mut Over<'_>,
) -> Result<Ended> {
    let parting = session(bench, server.args.timeout, &server.terms, orders)?;
    if let Some(line) = crate::perf::roce_line(&bench.device) {
        say(&format!("client {number}: RoCE port: {line}"));
    }
    let (words, ended) = match parting {
        Parting::Goodbye { well: true } => ("done", Ended::Well),
        Parting::Goodbye { well: false } => ("it found errors", Ended::CheckFailedThere),
        Parting::Lost(how) => bail!(how),
    };
    say(&format!("client {number}: {words}"));
    Ok(ended)
}

/// The client is told why it cannot be served.
fn turned_away(caller: Caller, why: anyhow::Error) -> anyhow::Error {
    caller.refuse(&Refusal::new(RefusalKind::Other, crate::words(&why)));
    why
}

/// One line, at once: whoever watches a server reads it through a pipe.
fn say(line: &str) {
    // That it cannot be said (a full disk) does not end the server.
    let _ = crate::out::say(&format!("doorbell serve: {line}\n"));
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn with_server(words: &[&str], test: impl FnOnce(&Server<'_>)) {
        let all = ["doorbell", "serve"].iter().chain(words);
        let Command::Serve(args) = Cli::parse_from(all).command else {
            panic!("it is `serve`");
        };
        test(&Server {
            args: &args,
            stop: &AtomicBool::new(false),
            terms: Terms::of_server(memory(&args)),
            served: AtomicU32::new(0),
            refused: AtomicU32::new(0),
            outcome: Mutex::new(None),
        });
    }

    /// A mistake of ours in a client's thread: the server's own thread goes on, the place is free, and the next client is served.
    #[test]
    fn a_panic_ends_one_client_and_frees_its_place() {
        with_server(&["--clients", "1"], |server| {
            std::thread::scope(|scope| {
                for number in 1..=2 {
                    let place = Place::take(&server.served);
                    assert_eq!(server.served.load(Ordering::Relaxed), 1);
                    let work = move || server.attend(place, number, || panic!("of a test"));
                    scope.spawn(work).join().expect("its thread ended well");
                    assert_eq!(server.served.load(Ordering::Relaxed), 0);
                }
            });
            assert!(server.outcome().is_none());
        });
        with_server(&["--once"], |server| {
            let place = Place::take(&server.served);
            server.attend(place, 7, || panic!("of a test"));
            let outcome = server.outcome().take().expect("an end");
            let words = crate::words(&outcome.expect_err("no good one"));
            assert!(
                words.contains("client 7") && words.contains("report"),
                "{words}"
            );
        });
    }

    #[test]
    fn clients_have_half_of_the_memory_there_is_unless_it_is_said() {
        with_server(&["--memory", "3M"], |server| {
            assert!(server.terms.take(3 << 20).is_ok());
            assert!(server.terms.take((3 << 20) + 1).is_err());
        });
        with_server(&[], |server| {
            let half = memory(server.args);
            assert!(half > 0);
            assert!(server.terms.take(half).is_ok());
        });
    }
}
