//! Where a fault script meets a queue pair.
//!
//! Nothing here is on the way of an engine without a script: `stop_at` and `bell_stop` are then beyond every index, and `tampered` is
//! false. With one, a batch ends before the next work request that a rule names; that one is executed by itself, through `one`, so that
//! the loops of `hot` need not know; and what it does to completions is done where `complete` and `publish` write them.

use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use doorbell_wire::{Ctrl, Qpn, Syndrome, Vendor};

use super::Cx;
use super::cq::CqWriter;
use super::qp::{EngineQp, Target};
use crate::script::run::{Armed, At, NEVER, corrupt, corruption};
use crate::script::{Action, Place, ScriptRun};

/// What a script has in mind for a queue pair.
#[derive(Debug)]
pub(crate) struct QpScript {
    run: Arc<ScriptRun>,
    nth: u64,
    armed: Vec<Armed>,
    /// Work requests whose completions are to be tampered with, and by which rule.
    cqes: VecDeque<(u64, usize)>,
    held: Vec<Held>,
}

/// Something that is kept back for a time.
#[derive(Clone, Copy, Debug)]
enum Held {
    Bell { due: u64 },
    Cqe { due: u64, at: u64, words: [u64; 8] },
}

impl Held {
    fn due(self) -> u64 {
        match self {
            Self::Bell { due } | Self::Cqe { due, .. } => due,
        }
    }
}

/// What is to become of the batch.
pub(super) enum Says {
    /// It ends before this slot.
    Until(u64),
    /// It is the work request at the head, alone.
    Alone,
    /// Nothing is done in this turn.
    Nothing,
    /// The work request at the head fails.
    Fail(Syndrome, Vendor, Option<Ctrl>),
}

impl EngineQp {
    /// A script is played on this queue pair, the `nth` of its HCA.
    pub(crate) fn adopt(&mut self, run: &Arc<ScriptRun>, nth: u64) {
        let armed = run.rules_of(self.qpn(), nth, false);
        if armed.is_empty() {
            return;
        }
        self.cold.script = Some(Box::new(QpScript {
            run: Arc::clone(run),
            nth,
            armed,
            cqes: VecDeque::new(),
            held: Vec::new(),
        }));
        self.aim();
    }

    /// From the beginning, after a reset.
    pub(super) fn restart_script(&mut self) {
        let qpn = self.qpn();
        let core = self.cold.shared.core;
        if let Some(script) = &mut self.cold.script {
            script.armed = script.run.rules_of(qpn, script.nth, false);
            script.cqes.clear();
            script.drop_held(core, |_| true);
            self.aim();
        }
    }

    /// Where the script has to be asked next.
    pub(super) fn aim(&mut self) {
        (self.stop_at, self.bell_stop, self.tampered) = (NEVER, NEVER, false);
        let core = self.cold.shared.core;
        let exec = self.exec;
        let Some(script) = &self.cold.script else {
            return;
        };
        for armed in &script.armed {
            if !script.run.is_awake(core, armed.rule) {
                continue;
            }
            let stop = match script.run.rule(armed.rule).action.is_of_doorbells() {
                true => &mut self.bell_stop,
                false => &mut self.stop_at,
            };
            *stop = (*stop).min(armed.next);
        }
        if let Some((at, _)) = script.cqes.iter().find(|c| c.0 >= exec) {
            self.stop_at = self.stop_at.min(*at);
        }
        self.tampered = !script.cqes.is_empty() || !script.held.is_empty();
    }

    /// The time of a rule has come: it does not fire at what lies behind.
    pub(super) fn wake_script(&mut self) {
        let (exec, pi) = (self.exec, self.pi);
        if let Some(script) = &mut self.cold.script {
            for armed in &mut script.armed {
                let rule = script.run.rule(armed.rule);
                let here = if rule.action.is_of_doorbells() {
                    pi
                } else {
                    exec
                };
                if rule.at.is_some() && armed.next < here {
                    armed.next = rule.next(here).unwrap_or(NEVER);
                }
            }
            self.aim();
        }
    }

    /// A doorbell announces `n` slots, and a rule names one of them: how many of them the engine sees.
    #[cold]
    pub(super) fn script_bell(&mut self, n: u64) -> u64 {
        let (pi, qpn, core) = (self.pi, self.qpn(), self.cold.shared.core);
        let Some(script) = &mut self.cold.script else {
            return n;
        };
        let mut seen = n;
        let run = &script.run;
        let due = |a: &&mut Armed| {
            a.next < pi + n
                && run.rule(a.rule).action.is_of_doorbells()
                && run.is_awake(core, a.rule)
        };
        if let Some(first) = script.armed.iter_mut().filter(due).min_by_key(|a| a.next) {
            let rule = first.rule;
            if run.take(rule) {
                let at = first.next.max(pi);
                seen = at - pi;
                // Each announcement is lost once: the next doorbell announces the same slots again.
                first.next = run.rule(rule).next(pi + n).unwrap_or(NEVER);
                let (slots, them) = match pi + n - at {
                    1 => (format!("slot {at} is"), "it"),
                    _ => (format!("slots {at} to {} are", pi + n - 1), "them"),
                };
                let note = match run.rule(rule).action {
                    Action::DelayDoorbell(by) => {
                        script.held.push(Held::Bell {
                            due: run.later(Some(by)),
                        });
                        run.cores[core].held.fetch_add(1, Ordering::Relaxed);
                        format!(
                            "{slots} not seen for {by:?}, unless a later doorbell covers {them}"
                        )
                    }
                    _ => format!("{slots} not seen, unless a later doorbell covers {them}"),
                };
                run.fired(rule, At::wqe(core, qpn, at), note);
                self.tape
                    .event(crate::record::Kind::Fault, at, 1, rule as u32 + 1);
                self.cold.shared.counters.faults.add(1);
            } else {
                first.next = NEVER;
            }
        }
        self.aim();
        seen
    }

    /// The batch would go past a work request that a rule names.
    ///
    /// # Safety
    /// The QP is attached.
    #[cold]
    pub(super) unsafe fn script_says(&mut self, cx: &mut Cx<'_>) -> Says {
        let (at, qpn, core) = (self.exec, self.qpn(), self.cold.shared.core);
        if at < self.stop_at {
            return Says::Until(self.stop_at);
        }
        let under_way = self.is_under_way();
        let Some(script) = &mut self.cold.script else {
            return Says::Until(NEVER);
        };
        let run = Arc::clone(&script.run);
        let due: Vec<usize> = (0..script.armed.len())
            .filter(|&i| {
                let armed = script.armed[i];
                armed.next <= at
                    && !run.rule(armed.rule).action.is_of_doorbells()
                    && run.is_awake(core, armed.rule)
            })
            .collect();
        let fails = |i: &usize| matches!(run.rule(script.armed[*i].rule).action, Action::Fail(..));
        if under_way && due.iter().any(fails) {
            // What is under way completes first.
            return Says::Nothing;
        }
        let ends = |i: &usize| {
            let action = run.rule(script.armed[*i].rule).action;
            action.is_of_engines() || action == Action::KillPeer
        };
        if due.iter().any(ends) {
            // What the engine has seen so far is told first: it may not come to it again.
            self.publish_indexes();
            // SAFETY: the caller's promise.
            unsafe { self.watch() };
        }
        let mut says = None;
        for i in due {
            let Some(script) = &mut self.cold.script else {
                break;
            };
            let armed = &mut script.armed[i];
            let rule = armed.rule;
            armed.next = run.rule(rule).next(at + 1).unwrap_or(NEVER);
            if !run.take(rule) {
                armed.next = NEVER;
                continue;
            }
            let action = run.rule(rule).action;
            if action.is_of_cqes() {
                // Told when the CQE is due.
                script.cqes.push_back((at, rule));
                continue;
            }
            // What came of it, or why that is nothing.
            let mut outcome = Ok(String::new());
            match action {
                Action::Fail(syndrome, vendor) => {
                    // SAFETY: `exec < pi`: a slot of the ring, which is mapped.
                    let ctrl = Ctrl::parse(unsafe { self.chunk(at, 0) });
                    let ctrl = ctrl.matches(at as u16, qpn).then_some(ctrl);
                    says = Some(Says::Fail(syndrome, vendor, ctrl));
                }
                Action::StallEngine(_) => says = says.or(Some(Says::Nothing)),
                Action::KillPeer => outcome = self.kill_peer(),
                Action::DropLink(_) if !matches!(self.cold.target, Target::Roce(_)) => {
                    outcome = Err("this queue pair sends no packets, so none are lost".into());
                }
                _ => {}
            }
            self.cold.shared.counters.faults.add(1);
            let acts = outcome.is_ok();
            run.played(rule, At::wqe(core, qpn, at), outcome);
            self.tape
                .event(crate::record::Kind::Fault, at, 1, rule as u32 + 1);
            if acts {
                let place = format!("at QP {:#08x} WQE {at}", qpn.get());
                act(&run, core, rule, action, &place);
            }
        }
        self.aim();
        let _ = cx;
        match says {
            Some(says) => says,
            None if self.stop_at > at => Says::Until(self.stop_at),
            None => Says::Alone,
        }
    }

    /// Kills the process at the other end; what came of it, or why that is nothing.
    fn kill_peer(&self) -> Result<String, String> {
        let peer = match &self.cold.target {
            Target::Peer(peer) => peer.process(),
            _ => None,
        };
        let Some(pid) = peer else {
            let why = "only a peer over shared memory is known by its process; give rank=R: kill-process to it";
            return Err(why.into());
        };
        let killed = rustix::process::Pid::from_raw(pid as i32)
            .ok_or(rustix::io::Errno::SRCH)
            .and_then(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
        match killed {
            Ok(()) => Ok(format!("process {pid} was killed")),
            Err(e) => Err(format!("process {pid} could not be killed: {e}")),
        }
    }

    /// The CQE of position `at` is due. `true`: a rule has taken care of it, and it is not to be written.
    #[cold]
    pub(super) fn script_cqe(&mut self, at: u64, write: impl Fn(&CqWriter)) -> bool {
        let (cq, qpn, core, collapsed) =
            (self.cq, self.qpn(), self.cold.shared.core, !self.per_slot());
        let Some(script) = &mut self.cold.script else {
            return false;
        };
        // A collapsed CQE stands for everything before it.
        let meant = |c: &(u64, usize)| if collapsed { c.0 <= at } else { c.0 == at };
        let found = script.cqes.iter().copied().find(meant);
        script.cqes.retain(|c| !meant(c));
        let Some((of, rule)) = found else {
            if collapsed {
                // A newer CQE: what was kept back would turn the clock back.
                script.drop_held(core, |h| matches!(h, Held::Cqe { .. }));
            }
            self.aim();
            return false;
        };
        let run = Arc::clone(&script.run);
        let note = tamper(&run, rule, at, cq, write, |due, words| {
            script.held.push(Held::Cqe { due, at, words });
            run.cores[core].held.fetch_add(1, Ordering::Relaxed);
        });
        let note = match of == at {
            true => note,
            false => format!("{note}; it stood for WQEs up to {at}"),
        };
        run.fired(rule, At::wqe(core, qpn, of), note);
        self.tape
            .event(crate::record::Kind::Fault, of, 1, rule as u32 + 1);
        self.cold.shared.counters.faults.add(1);
        self.aim();
        true
    }

    /// Lets go of what was kept back and whose time has come. `true`: look at the doorbell again.
    ///
    /// # Safety
    /// The QP is attached.
    pub(super) unsafe fn script_due(&mut self, now: u64) -> bool {
        let core = self.cold.shared.core;
        let mut bell = false;
        let Some(script) = &mut self.cold.script else {
            return false;
        };
        let mut ready = Vec::new();
        script.drop_held(core, |held| {
            let due = held.due() <= now;
            if due {
                ready.push(*held);
            }
            due
        });
        for held in ready {
            match held {
                Held::Bell { .. } => {
                    // Whatever the word is, it is news.
                    // SAFETY: the caller's promise.
                    self.bell_seen = !unsafe { self.read_bell() };
                    bell = true;
                }
                // SAFETY: the caller's promise.
                Held::Cqe { at, words, .. } => unsafe { self.cq.put(at, &words) },
            }
        }
        self.aim();
        bell
    }
}

impl QpScript {
    fn drop_held(&mut self, core: usize, mut gone: impl FnMut(&Held) -> bool) {
        let before = self.held.len();
        self.held.retain(|h| !gone(h));
        self.run.cores[core]
            .held
            .fetch_sub(before - self.held.len(), Ordering::Relaxed);
    }
}

/// Withholds or corrupts a CQE that `write` would write; what came of it, in words.
fn tamper(
    run: &ScriptRun,
    rule: usize,
    at: u64,
    cq: CqWriter,
    write: impl Fn(&CqWriter),
    hold: impl FnOnce(u64, [u64; 8]),
) -> String {
    let mut words = [0u64; 8];
    cq.onto(&mut words, |scratch| write(scratch));
    match run.rule(rule).action {
        Action::CorruptCqe(own) => {
            let before = words[7];
            corrupt(&mut words, run.mask(rule, own, at));
            // SAFETY: who asks has a CQ that is mapped (a QP that is attached, a receive queue that is open).
            unsafe { cq.put(at, &words) };
            corruption(before, words[7])
        }
        Action::WithholdCqe(Some(by)) => {
            hold(run.later(Some(by)), words);
            format!("executed; its CQE comes {by:?} late")
        }
        _ => "executed, but no CQE was written".into(),
    }
}

/// What concerns the engine core or the process.
fn act(run: &ScriptRun, core: usize, rule: usize, action: Action, place: &str) {
    let state = &run.cores[core];
    match action {
        Action::StallEngine(by) => state
            .stalled_until
            .store(run.later(Some(by)), Ordering::Relaxed),
        Action::DropLink(by) => state
            .link_down_until
            .store(run.later(by), Ordering::Relaxed),
        Action::KillEngine => {
            let name = crate::script::name_rule(rule + 1, &run.rule(rule).text);
            let why = format!("{name} killed it {place}");
            // As a panic, but without the panic hook's message: the engine's own says it.
            std::panic::resume_unwind(Box::new(why));
        }
        Action::KillProcess => {
            let own = rustix::process::getpid();
            let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        }
        _ => {}
    }
}

impl super::Core {
    /// Once a round, when a script is played. `true`: the core does nothing in this round.
    #[cold]
    pub(super) fn play(&mut self, run: &Arc<ScriptRun>) -> bool {
        let state = &run.cores[self.index];
        let now = run.now();
        if now < state.stalled_until.load(Ordering::Relaxed) {
            return true;
        }
        for (i, rule) in run.script().rules.iter().enumerate() {
            let time_has_come = rule.at.is_some_and(|at| at.as_nanos() as u64 <= now);
            if !time_has_come || state.awake[i].swap(true, Ordering::Relaxed) {
                continue;
            }
            for qp in self.qps.iter_mut().flatten() {
                qp.wake_script();
            }
            if rule.place == Place::Engine && run.take(i) {
                let here = At {
                    core: self.index,
                    ..At::default()
                };
                // A port that is opened later loses its packets too.
                let note = match (rule.action, &self.roce) {
                    (Action::DropLink(_), None) => {
                        format!("engine core {}, which has no packet port yet", self.index)
                    }
                    _ => format!("engine core {}", self.index),
                };
                run.fired(i, here, note);
                act(run, self.index, i, rule.action, "when its time had come");
            }
        }
        if state.held.load(Ordering::Relaxed) != 0 {
            for (slot, qp) in self.qps.iter_mut().enumerate() {
                let Some(qp) = qp.as_deref_mut() else {
                    continue;
                };
                // SAFETY: a QP in the table is attached.
                if unsafe { qp.script_due(now) } && !qp.listed {
                    qp.listed = true;
                    qp.idle_turns = 0;
                    self.listed.push(slot as u32);
                }
                if let Some(Ok(mut recv)) = qp.cold.shared.recv.as_ref().map(|r| r.try_lock()) {
                    // SAFETY: an open receive queue's memory is mapped.
                    unsafe { recv.script_due(now) };
                }
            }
        }
        now < state.stalled_until.load(Ordering::Relaxed)
    }
}

/// What a script has in mind for a receive queue.
#[derive(Debug)]
pub(crate) struct RecvScript {
    run: Arc<ScriptRun>,
    qpn: Qpn,
    nth: u64,
    core: usize,
    armed: Vec<Armed>,
    held: Vec<(u64, u64, [u64; 8])>,
}

impl RecvScript {
    pub(crate) fn new(run: &Arc<ScriptRun>, qpn: Qpn, nth: u64, core: usize) -> Option<Box<Self>> {
        let armed = run.rules_of(qpn, nth, true);
        (!armed.is_empty()).then(|| {
            Box::new(Self {
                run: Arc::clone(run),
                qpn,
                nth,
                core,
                armed,
                held: Vec::new(),
            })
        })
    }

    pub(super) fn restart(&mut self) {
        self.armed = self.run.rules_of(self.qpn, self.nth, true);
        self.forget(|_| true);
    }

    fn forget(&mut self, mut gone: impl FnMut(&(u64, u64, [u64; 8])) -> bool) {
        let before = self.held.len();
        self.held.retain(|h| !gone(h));
        self.run.cores[self.core]
            .held
            .fetch_sub(before - self.held.len(), Ordering::Relaxed);
    }

    /// The CQE of receive number `at` is due.
    #[cold]
    pub(super) fn cqe(&mut self, at: u64, cq: CqWriter, write: impl Fn(&CqWriter)) {
        let Self {
            run,
            qpn,
            core,
            armed,
            held,
            ..
        } = self;
        let due = armed
            .iter_mut()
            .find(|a| a.next <= at && run.is_awake(*core, a.rule));
        let Some(armed) = due else {
            return write(&cq);
        };
        let rule = armed.rule;
        armed.next = run.rule(rule).next(at + 1).unwrap_or(NEVER);
        if !run.take(rule) {
            armed.next = NEVER;
            return write(&cq);
        }
        let note = tamper(run, rule, at, cq, write, |due, words| {
            held.push((due, at, words));
            run.cores[*core].held.fetch_add(1, Ordering::Relaxed);
        });
        let here = At {
            receive: true,
            ..At::wqe(*core, *qpn, at)
        };
        run.fired(rule, here, note);
    }

    /// Writes what was kept back and whose time has come.
    ///
    /// # Safety
    /// The CQ is mapped.
    pub(super) unsafe fn due(&mut self, now: u64, cq: CqWriter) {
        self.forget(|&(due, at, ref words)| {
            if due > now {
                return false;
            }
            // SAFETY: the caller's promise.
            unsafe { cq.put(at, words) };
            true
        });
    }
}
