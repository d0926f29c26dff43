//! `doorbell explain`: one operation run for real and shown byte by byte, then once more with a mistake in it.
//!
//! A thread of the host GPU posts with the code that GPU threads run; the command looks at the queue before the engine does,
//! runs the engine, and shows what came back. What the engine checks is worked out beside it and compared with its answer.

mod checks;
mod fault;
mod fields;
mod lab;
mod page;
#[cfg(test)]
mod tests;

use std::io::{self, Write};

use anyhow::{Context, Result, anyhow, ensure};

use self::checks::{Refusal, Region, rights};
use self::fields::Seen;
use self::lab::{ADD, Acted, FOUND, Lab, MESSAGE, WAS};
use self::page::Page;
use crate::args::{Bad, ExplainArgs, Operation};
use crate::{Ended, WrongArguments};

/// Explains.
pub(crate) fn run(args: &ExplainArgs) -> Result<Ended> {
    let styled = crate::is_styled(&io::stdout());
    let mut out = io::BufWriter::new(crate::out::out());
    tell(&mut out, styled, args)?;
    out.flush().context("writing to standard output")?;
    Ok(Ended::Well)
}

fn tell(out: &mut dyn Write, styled: bool, args: &ExplainArgs) -> Result<()> {
    let page = &mut Page::new(out, styled);
    let mut lab = Lab::open()?;
    let operation = args.operation;
    let bad = match (operation, args.bad) {
        (Operation::Send, None) => Bad::Lkey,
        (Operation::Send, Some(bad)) if bad != Bad::Lkey => {
            return Err(anyhow!(
                "a SEND names no memory of the target: --bad lkey is the mistake that it can have"
            )
            .context(WrongArguments));
        }
        (_, bad) => bad.unwrap_or(Bad::Rkey),
    };
    page.heading(title(operation))?;
    set_up(page, &lab)?;
    let good = well(page, &mut lab, operation)?;
    page.gap()?;
    match args.fault.as_slice() {
        [] => badly(page, lab, operation, bad, &good),
        rules => {
            drop(lab);
            fault::played(page, operation, &rules.join("\n"), &good)
        }
    }
}

fn title(operation: Operation) -> &'static str {
    match operation {
        Operation::Put => "put: bytes from the thread's side are written into the target's memory",
        Operation::Get => "get: bytes of the target's memory are read into the thread's side",
        Operation::Signal => "signal: a put, then an addition by which the target learns of it",
        Operation::Send => "send: bytes go to memory that the target has posted for them",
        Operation::Atomic => "atomic: a word of the target goes up, its old value comes back",
    }
}

fn set_up(page: &mut Page<'_>, lab: &Lab) -> Result<()> {
    let region = |r: &Region| {
        format!(
            "\"{}\": key {:#010x}, {:#x}+{:#x}, PD {}, grants {}",
            r.name,
            r.key,
            r.base,
            r.len,
            r.pd,
            rights(r.access)
        )
    };
    let regions = lab.regions();
    page.facts(&[
        (
            "thread",
            format!(
                "one of the host GPU: a host thread with the code that GPU threads run; QP {:#08x}, {} slots of 64 bytes",
                lab.near.qpn(),
                lab.near.depth()
            ),
        ),
        ("", region(&regions[0])),
        ("target", format!("QP {:#08x}, in the same process (loopback)", lab.far.qpn())),
        ("", region(&regions[1])),
        (
            "engine",
            "the software HCA; it runs when this command lets it, so that the queue can be looked at first".to_owned(),
        ),
    ])?;
    Ok(())
}

/// The name of a key, for those who read its bytes.
fn key_names(regions: Vec<Region>) -> impl Fn(u32) -> String {
    move |key| match regions.iter().find(|r| r.key == key) {
        Some(region) => format!("{key:#010x}: \"{}\"", region.name),
        None => format!("{key:#010x}: nobody's"),
    }
}

fn well(page: &mut Page<'_>, lab: &mut Lab, operation: Operation) -> Result<Acted> {
    let names = key_names(lab.regions());
    let before = lab.changed(operation)?;
    let acted = lab.act(operation, None)?;

    if let Some(receive) = acted.queue.receive {
        page.gap()?;
        page.text(&format!(
            "Before: the target posted a receive, {} bytes at {:#x}, by a data segment in its own ring and record.",
            receive.len, receive.addr
        ))?;
    }
    page.stage(1, "The thread writes the work request (WQE) into its ring")?;
    for (i, wqe) in acted.wqes.iter().enumerate() {
        let segments = fields::wqe(wqe, &names);
        let at = acted.first + i as u64;
        if acted.wqes.len() > 1 {
            let what = if i == 0 { "the put" } else { "the addition" };
            page.text(&format!("slot {at}: {what}"))?;
        } else {
            page.text(&format!("slot {at}, 64 bytes, four stores of 16:"))?;
        }
        page.hex(wqe, None, &segments)?;
        // Of several, the last is the operation's own; the first is a put, as the page on puts has it.
        if i + 1 == acted.wqes.len() {
            page.fields(wqe, &segments)?;
        }
    }

    page.stage(2, "It publishes and rings")?;
    page.text("First the record, so that it never lags; then the doorbell, one store of 8 bytes:")?;
    page.field(&acted.record, &fields::record(acted.record))?;
    page.field(&acted.doorbell, &fields::doorbell(acted.doorbell))?;

    page.stage(
        3,
        "The engine sees the doorbell, reads each WQE once, and checks it",
    )?;
    let refused = engine(page, lab, &acted)?;
    ensure!(
        refused.is_none(),
        "the engine was expected to refuse a sound request: a bug, please report it"
    );

    page.stage(4, "It writes the completion (CQE)")?;
    completion(page, &acted)?;
    agree(&acted, refused)?;

    page.stage(5, "The thread's wait ends")?;
    page.text(&format!(
        "wait(ticket {}) returned {}: the CQE's index covers the ticket.",
        acted.ticket.0,
        outcome(&acted)
    ))?;
    result(page, lab, operation, &before)?;
    if let Some((received, cqe)) = &acted.received {
        page.stage(6, "The target's receive completes")?;
        page.text(&format!(
            "recv_wait(ticket {}) returns {} bytes; the CQE of the receive queue:",
            received.ticket.0, received.bytes
        ))?;
        let segments = fields::cqe(cqe);
        for field in segments.iter().flat_map(|s| &s.fields) {
            page.field(cqe, field)?;
        }
    }
    ensure!(
        acted.received.is_some() == (operation == Operation::Send),
        "a receive completed for no SEND, or none for one"
    );
    Ok(acted)
}

/// The engine's checks; why it refuses, if it does.
fn engine(page: &mut Page<'_>, lab: &Lab, acted: &Acted) -> Result<Option<Refusal>> {
    let regions = lab.regions();
    let (list, new) = checks::doorbell(acted.doorbell, &acted.queue);
    page.checks(&list)?;
    for (i, wqe) in acted.wqes.iter().enumerate() {
        let at = acted.first + i as u64;
        let (list, refused) = checks::wqe(wqe, at, acted.first + new, &acted.queue, &regions);
        if acted.wqes.len() > 1 {
            page.text(&format!("slot {at}:"))?;
        }
        page.checks(&list)?;
        if refused.is_some() {
            return Ok(refused);
        }
    }
    Ok(None)
}

/// The engine's answer is the one that was worked out beside it.
fn agree(acted: &Acted, expected: Option<Refusal>) -> Result<()> {
    let answer = match fields::seen(&acted.cqe) {
        Seen::Failed(error) => Some(Refusal {
            syndrome: error.syndrome,
            vendor: error.vendor,
        }),
        Seen::Done => None,
        Seen::Nothing => anyhow::bail!("there is no CQE: a bug, please report it"),
    };
    ensure!(
        answer == expected,
        "the engine answered {answer:?} where its rules say {expected:?}: a bug, please report it"
    );
    Ok(())
}

fn completion(page: &mut Page<'_>, acted: &Acted) -> Result<()> {
    let segments = fields::cqe(&acted.cqe);
    page.text("64 bytes, of which the last is written last: who polls it sees all or nothing.")?;
    page.hex(&acted.cqe, Some(&acted.cqe_before), &segments)?;
    for field in segments.iter().flat_map(|s| &s.fields) {
        page.field(&acted.cqe, field)?;
    }
    Ok(())
}

fn outcome(acted: &Acted) -> String {
    match &acted.outcome {
        Ok(()) => "Ok".to_owned(),
        Err(error) => format!("an error: {error}"),
    }
}

/// What is different in memory.
fn result(page: &mut Page<'_>, lab: &Lab, operation: Operation, before: &[u8]) -> Result<()> {
    let after = lab.changed(operation)?;
    match operation {
        Operation::Put | Operation::Get | Operation::Send => {
            let (place, expected) = match operation {
                Operation::Put | Operation::Send => ("target", MESSAGE),
                _ => ("source", FOUND),
            };
            ensure!(
                after == expected,
                "the bytes that arrived are not those that were sent"
            );
            page.text(&format!(
                "In \"{place}\" now: {:?} ({} bytes, zeros before).",
                String::from_utf8_lossy(&after),
                after.len()
            ))?;
            ensure!(
                before.iter().all(|b| *b == 0),
                "the place was not empty before"
            );
        }
        Operation::Signal | Operation::Atomic => {
            let now = number(&after);
            ensure!(
                (number(before), now) == (WAS, WAS + ADD),
                "the word is {now}"
            );
            page.text(&format!("The target's word was {WAS} and is {now}."))?;
            let old = lab.old()?;
            ensure!(old == WAS, "the old value that came back is {old}");
            page.text(match operation {
                Operation::Signal => {
                    "Whoever waits there for it to reach 42 finds the bytes of the put in place: requests of one queue take effect in order."
                }
                _ => "Its old value, 40, lies where the data segment says: 0x10300 of \"source\".",
            })?;
        }
    }
    Ok(())
}

fn number(bytes: &[u8]) -> u64 {
    bytes
        .first_chunk::<8>()
        .map_or(0, |word| u64::from_ne_bytes(*word))
}

fn mistake(bad: Bad) -> &'static str {
    match bad {
        Bad::Rkey => "The same with a wrong rkey: one that no region has",
        Bad::Lkey => "The same with a wrong lkey: one that no region has",
        Bad::Range => "The same, reaching over the end of the target's region",
        Bad::Access => "The same with the key of a region that grants peers nothing",
    }
}

fn badly(
    page: &mut Page<'_>,
    mut lab: Lab,
    operation: Operation,
    bad: Bad,
    good: &Acted,
) -> Result<()> {
    page.heading(mistake(bad))?;
    let names = key_names(lab.regions());
    lab.clear()?;
    let before = lab.changed(operation)?;
    let acted = lab.act(operation, Some(bad))?;

    page.stage(1, "The WQE: only the numbers differ")?;
    // Of a signal, the addition carries the mistake.
    let (wqe, was) = (acted.wqes.last(), good.wqes.last());
    if let (Some(wqe), Some(was)) = (wqe, was) {
        let segments = fields::wqe(wqe, &names);
        page.hex(wqe, Some(was), &segments)?;
        let changed = segments
            .iter()
            .flat_map(|s| &s.fields)
            .filter(|f| wqe.get(f.bytes.clone()) != was.get(f.bytes.clone()));
        for field in changed {
            page.field(wqe, field)?;
        }
    }

    page.stage(2, "The engine checks, and stops at the first that fails")?;
    let refused = engine(page, &lab, &acted)?;
    ensure!(
        refused.is_some(),
        "a request with a mistake passed every check: a bug, please report it"
    );

    page.stage(3, "It answers with an error CQE")?;
    completion(page, &acted)?;
    agree(&acted, refused)?;

    page.stage(4, "What each party sees")?;
    parties(page, &lab, operation, bad, &acted, &before)?;

    page.stage(5, "The way back")?;
    let mut lab = lab.again()?;
    page.text("Qp::reset, then Qp::connect: same number, same export, slot 0 again.")?;
    let again = lab.act(operation, None)?;
    ensure!(
        again.outcome.is_ok(),
        "it does not work again after the reset"
    );
    page.text(&format!(
        "Posted once more: wait(ticket {}) returned {}.",
        again.ticket.0,
        outcome(&again)
    ))?;
    Ok(())
}

fn parties(
    page: &mut Page<'_>,
    lab: &Lab,
    operation: Operation,
    bad: Bad,
    acted: &Acted,
    before: &[u8],
) -> Result<()> {
    ensure!(
        acted.outcome.is_err(),
        "the thread was not told of the failure"
    );
    let later = lab.refusal()?;
    ensure!(
        later.is_some(),
        "a queue pair in error took another request"
    );
    let event = lab.next_error();
    let event = event.context("the device told its owner of no error")?;
    let unchanged = lab.changed(operation)? == before;
    ensure!(unchanged, "a refused request changed memory");
    if operation == Operation::Signal {
        let put = lab.changed(Operation::Put)?;
        ensure!(put == MESSAGE, "the put before the addition did not arrive");
    }
    let at = match operation {
        Operation::Put | Operation::Atomic => "its memory is as before",
        Operation::Get => "nobody read its memory",
        Operation::Send => "its receive is still posted, and its memory as before",
        Operation::Signal => "the put arrived, the addition did not: its word is as before",
    };
    ensure!(acted.received.is_none(), "a refused SEND took a receive");
    let told = match bad {
        Bad::Lkey => "it is told nothing; nor would a NIC tell it",
        _ => {
            "a NIC of its own would have found the mistake there, answered NAK, and put this queue pair into error as well"
        }
    };
    page.facts(&[
        ("thread", format!("wait returned {}", outcome(acted))),
        (
            "",
            "what it posts next is refused at once, with the same error; what was rung already is flushed (WR_FLUSH)".to_owned(),
        ),
        (
            "host",
            lab.near
                .error()
                .map_or(String::new(), |fault| format!("Qp::error: {fault}")),
        ),
        ("", format!("Device::next_error, once: {event}")),
        ("", format!("the queue pair is {}", lab.near.state())),
        (
            "target",
            format!(
                "{at}; its queue pair is {}, and its CQ has nothing new",
                lab.far.state()
            ),
        ),
        ("", told.to_owned()),
    ])?;
    Ok(())
}
