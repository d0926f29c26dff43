//! `doorbell serve`: the far side of `perf --link roce --connect`, for any number of clients.
//!
//! Each client has a thread, a device and a RoCE port of its own, at the address by which it came, so that one client's
//! fault is not another's. A signal ends the server: who is being served is hung up on, and nothing stays behind.

use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use doorbell::connect::{Caller, Refusal, RefusalKind};
use doorbell::{Acceptor, Line};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::Ended;
use crate::args::{Link, ServeArgs};
use crate::perf::bench::{Bench, Benches};
use crate::perf::peer::{Parting, session};
use crate::perf::remote::{self, Over, port_at};

/// How often the server looks whether it should end.
const SLICE: Duration = Duration::from_millis(100);
/// What a stranger gets to say who it is.
const GREETING: Duration = Duration::from_secs(3);

/// A word that is true once SIGINT or SIGTERM came.
pub(crate) fn on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .context("asking for signals, by which this command ends")?;
    }
    Ok(stop)
}

/// Listens until a signal comes, or with `--once` until one client was served.
pub(crate) fn run(args: &ServeArgs) -> Result<Ended> {
    let stop = on_signals()?;
    let acceptor = Acceptor::bind(args.listen.as_deref())?;
    let at = acceptor.address();
    say(&format!(
        "listening on TCP {at}; on the other host: doorbell perf put-bw --link roce --connect HOST:{}",
        at.port()
    ));
    let (served, number) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            let Some(line) = acceptor.accept(SLICE)? else {
                continue;
            };
            if args.once {
                match client(args, line, 1, &stop)? {
                    Some(ended) => return Ok(ended),
                    // No client of ours.
                    None => continue,
                }
            }
            if served.load(Ordering::Relaxed) >= args.clients {
                let text = format!("it serves {} clients already: come later", args.clients);
                line.refuse(&Refusal::new(RefusalKind::Busy, text));
                continue;
            }
            served.fetch_add(1, Ordering::Relaxed);
            let number = number.fetch_add(1, Ordering::Relaxed) + 1;
            let (served, stop) = (&served, &stop);
            scope.spawn(move || {
                if let Err(e) = client(args, line, number, stop) {
                    say(&format!("client {number}: {}", crate::words(&e)));
                }
                served.fetch_sub(1, Ordering::Relaxed);
            });
        }
        say("a signal came: ending");
        Ok(Ended::Well)
    })
}

/// Serves one client to its end; `None` if it was none.
fn client(args: &ServeArgs, line: Line, number: u32, stop: &AtomicBool) -> Result<Option<Ended>> {
    let address = line.peer().to_owned();
    let port = args.port.clone().unwrap_or_else(|| port_at(&line));
    // Before a device is opened for it: who is it?
    let caller = match line.hear(GREETING) {
        Ok(caller) => caller,
        Err(e) => {
            say(&format!("{address}: {e}"));
            return Ok(None);
        }
    };
    let config = crate::config::of(&args.device, Some(&port));
    let purpose = caller.introduction().greeting.purpose.clone();
    let bench = match Benches::new(config, None).and_then(|mut b| b.of_peer(&purpose)) {
        Ok(bench) => bench,
        Err(e) => return Err(turned_away(caller, e)),
    };
    let greeting = match remote::greeting(&bench, Link::Roce, &args.job, "") {
        Ok(greeting) => greeting,
        Err(e) => return Err(turned_away(caller, e)),
    };
    let channel = match caller.welcome(&greeting, args.timeout) {
        Ok(channel) => channel,
        Err(e) => {
            say(&format!("{address}: {e}"));
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
        stop: &|| match stop.load(Ordering::Relaxed) {
            true => bail!("this server was told to end"),
            false => Ok(()),
        },
    };
    serve(&bench, args, number, &mut orders).map(Some)
}

fn serve(bench: &Rc<Bench>, args: &ServeArgs, number: u32, orders: &mut Over<'_>) -> Result<Ended> {
    let parting = session(bench, args.timeout, orders)?;
    if let Some(line) = crate::perf::roce_line(&bench.device) {
        say(&format!("client {number}: RoCE port: {line}"));
    }
    let (words, ended) = match parting {
        Parting::Goodbye { well: true } => ("done", Ok(Ended::Well)),
        Parting::Goodbye { well: false } => ("it found errors", Ok(Ended::CheckFailedThere)),
        Parting::Lost => (
            "it went without a word",
            Err(anyhow::anyhow!("client {number} went without a word")),
        ),
    };
    say(&format!("client {number}: {words}"));
    ended
}

/// The client is told why it cannot be served.
fn turned_away(caller: Caller, why: anyhow::Error) -> anyhow::Error {
    caller.refuse(&Refusal::new(RefusalKind::Other, crate::words(&why)));
    why
}

/// One line, at once: whoever watches a server reads it through a pipe.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A reader that is gone does not end the server.
    let _ = writeln!(out, "doorbell serve: {line}").and_then(|()| out.flush());
}
