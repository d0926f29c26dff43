//! The numbers of an HCA: which queue pair has which QPN, and which send CQ which CQN.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use doorbell_wire::{Cqn, Qpn};
use rand::Rng;

use crate::error::{HcaError, Result};
use crate::qp::shared::QpShared;

/// QPs and CQs by number.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    tables: RwLock<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    qps: HashMap<u32, Arc<QpShared>>,
    cqs: HashMap<u32, Arc<QpShared>>,
    next_qpn: u32,
    next_cqn: u32,
}

impl Queues {
    /// Numbers begin at random: packets for a process that is gone do not fit the next one.
    pub(crate) fn starting_anywhere() -> Self {
        let tables = Tables {
            next_qpn: rand::rng().random_range(0x100..0xff_ffff),
            ..Tables::default()
        };
        Self {
            tables: RwLock::new(tables),
        }
    }

    fn read<R>(&self, f: impl FnOnce(&Tables) -> R) -> R {
        f(&self.tables.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<R>(&self, f: impl FnOnce(&mut Tables) -> R) -> R {
        f(&mut self.tables.write().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn qp(&self, qpn: Qpn) -> Option<Arc<QpShared>> {
        self.read(|t| t.qps.get(&qpn.get()).cloned())
    }

    /// The QP whose send CQ has this number.
    pub(crate) fn by_cqn(&self, cqn: Cqn) -> Option<Arc<QpShared>> {
        self.read(|t| t.cqs.get(&cqn.get()).cloned())
    }

    pub(crate) fn alloc_cqn(&self) -> Result<Cqn> {
        self.write(|t| {
            next_free(&mut t.next_cqn, |n| t.cqs.contains_key(&n))
                .and_then(Cqn::new)
                .ok_or(HcaError::Exhausted { what: "CQ number" })
        })
    }

    /// Gives the QP a number and enters it. `class`: mask and value that the number must fit.
    pub(crate) fn enter(
        &self,
        cqn: Cqn,
        class: Option<(u32, u32)>,
        make: impl FnOnce(Qpn) -> QpShared,
    ) -> Result<Arc<QpShared>> {
        self.write(|t| {
            if t.cqs.contains_key(&cqn.get()) {
                return Err(HcaError::CqnInUse { cqn });
            }
            let other = |n: u32| class.is_some_and(|(mask, value)| n & mask != value);
            let qpn = next_free(&mut t.next_qpn, |n| other(n) || t.qps.contains_key(&n))
                .and_then(Qpn::new)
                .ok_or(HcaError::Exhausted { what: "QP number" })?;
            let shared = Arc::new(make(qpn));
            t.qps.insert(qpn.get(), Arc::clone(&shared));
            t.cqs.insert(cqn.get(), Arc::clone(&shared));
            Ok(shared)
        })
    }

    pub(crate) fn forget(&self, shared: &QpShared) {
        self.write(|t| {
            t.qps.remove(&shared.qpn.get());
            t.cqs.remove(&shared.cq.cqn.get());
        });
    }
}

/// The next number of 24 bits that is not taken. Numbers go round, so that a freed one stays unused for long; 0 to 0xff are never given.
fn next_free(next: &mut u32, taken: impl Fn(u32) -> bool) -> Option<u32> {
    const FIRST: u32 = 0x100;
    const LAST: u32 = 0xff_ffff;
    for _ in FIRST..=LAST {
        *next = if *next < FIRST || *next >= LAST {
            FIRST
        } else {
            *next + 1
        };
        if !taken(*next) {
            return Some(*next);
        }
    }
    None
}
