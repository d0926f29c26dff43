//! The second run of an explanation with `--fault`: the same operation while the HCA plays a fault script, and who notices what.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::lab::{Acted, Lab};
use super::page::Page;
use super::{fields, key_names, outcome};
use crate::WrongArguments;
use crate::args::Operation;
use doorbell::Device;
use doorbell::faults::{Action, load};

/// Faults that this set-up, one process over loopback, has nothing for.
fn check(script: &str) -> Result<()> {
    let script = load(script).map_err(|e| anyhow!(e).context(WrongArguments))?;
    for rule in &script.rules {
        let why = match rule.action {
            Action::KillProcess => "it would end this command before it has explained anything",
            Action::KillPeer | Action::DropLink(_) => {
                "here both ends are in one process, with no peer process and no packets"
            }
            _ => continue,
        };
        let wrong = anyhow!(
            "{}: {why}; `doorbell perf --link shm --fault …` (or roce) plays it",
            rule.text
        );
        return Err(wrong.context(WrongArguments));
    }
    Ok(())
}

/// Plays `script`, and shows it.
pub(super) fn played(
    page: &mut Page<'_>,
    operation: Operation,
    script: &str,
    good: &Acted,
) -> Result<()> {
    check(script)?;
    let mut lab = Lab::with_fault(script)?;
    page.heading(&format!("The same while the HCA plays: {}", script))?;
    let names = key_names(lab.regions());
    let before = lab.changed(operation)?;
    let acted = lab.act(operation, None)?;
    if lab.device.faults().iter().all(|rule| rule.fired == 0) {
        let last = acted.ticket.0;
        let more = match last {
            0 => String::new(),
            last => format!(" to {last}"),
        };
        let wrong = anyhow!(
            "no rule fired: this posts WQE 0{more} of the first queue pair, once: leave the selectors out, or say wqe=0"
        );
        return Err(wrong.context(WrongArguments));
    }

    page.stage(1, "The WQE and the doorbell: as they should be")?;
    for wqe in &acted.wqes {
        page.hex(wqe, None, &fields::wqe(wqe, &names))?;
    }
    page.field(&acted.record, &fields::record(acted.record))?;
    page.field(&acted.doorbell, &fields::doorbell(acted.doorbell))?;

    page.stage(2, "What the engine makes of it")?;
    for rule in lab.device.faults() {
        page.text(&rule.to_string())?;
    }
    let report = lab.device.report(Duration::from_millis(1));
    let qp = report.qps.iter().find(|q| q.qpn == lab.near.qpn());
    if let Some(engine) = qp.and_then(|q| q.engine.as_ref()) {
        page.text(&format!(
            "Slots posted {}, seen by the engine {}, complete {}.",
            acted.ticket.0 + 1,
            engine.rung,
            engine.completed
        ))?;
    }
    let dead = report.cores.iter().any(|core| core.dead.is_some());

    page.stage(3, "The CQE")?;
    if acted.cqe == acted.cqe_before {
        page.text("Nothing was written: all 64 bytes are as they were.")?;
    } else {
        let segments = fields::cqe(&acted.cqe);
        page.hex(&acted.cqe, Some(&good.cqe), &segments)?;
        for field in segments.iter().flat_map(|s| &s.fields) {
            page.field(&acted.cqe, field)?;
        }
    }

    page.stage(4, "What each party sees")?;
    let changed = lab.changed(operation)? != before;
    let mut facts = vec![
        (
            "thread",
            format!(
                "wait(ticket {}) returned {}",
                acted.ticket.0,
                outcome(&acted)
            ),
        ),
        (
            "memory",
            match changed {
                true => "the bytes arrived: the work was done, whatever the thread was told",
                false => "as before: nothing was done",
            }
            .to_owned(),
        ),
        ("host", format!("the queue pair is {}", lab.near.state())),
    ];
    if let Some(fault) = lab.near.error() {
        facts.push(("", format!("Qp::error: {fault}")));
    }
    if let Some(event) = lab.next_error() {
        facts.push(("", format!("Device::next_error, once: {event}")));
    }
    for (i, line) in diagnosis(&lab.device).into_iter().enumerate() {
        facts.push((if i == 0 { "dump" } else { "" }, line));
    }
    page.facts(&facts)?;

    page.stage(5, "The way back")?;
    back(page, lab, operation, &acted, dead)
}

/// What `doorbell dump` would say, while somebody runs the engine.
fn diagnosis(device: &Device) -> Vec<String> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                device.poll();
            }
        });
        let lines = device.diagnosis();
        done.store(true, Ordering::Relaxed);
        lines
    })
}

fn back(
    page: &mut Page<'_>,
    mut lab: Lab,
    operation: Operation,
    acted: &Acted,
    dead: bool,
) -> Result<()> {
    if acted.outcome.is_ok() {
        return Ok(page.text("None is needed: the thread was served.")?);
    }
    if lab.near.error().is_none()
        && !dead
        && let Ok(again) = lab.act(operation, None)
    {
        let served = again.outcome.is_ok();
        page.text(&format!(
            "Posted once more, with a doorbell of its own: wait(ticket {}) returned {}.{}",
            again.ticket.0,
            outcome(&again),
            match served {
                true => " The CQ has one CQE, which stands for all before it: the first is served as well.",
                false => "",
            }
        ))?;
        if served {
            return Ok(());
        }
    }
    match lab.again() {
        Ok(mut lab) => {
            page.text("Qp::reset, then Qp::connect: same number, same export, slot 0 again.")?;
            let again = lab.act(operation, None)?;
            page.text(&format!(
                "Posted once more: wait(ticket {}) returned {}.",
                again.ticket.0,
                outcome(&again)
            ))?;
        }
        Err(error) => page.text(&format!(
            "Qp::reset fails: {}. What is left is to close the device and to open it anew.",
            crate::words(&error)
        ))?,
    }
    Ok(())
}
