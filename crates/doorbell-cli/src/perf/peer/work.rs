//! What is done while an order is carried out that takes its time.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::super::pipe::Answer;
use super::Orders;

/// Work that takes longer is said to go on, so often.
pub(super) const GOES_ON: Duration = Duration::from_millis(100);

/// Work at an order that may take its time: ended with whoever ordered it, and with this process; and every now and then it is said that it goes on, for
/// the other side's time-out is about nothing happening.
pub(super) struct Work<'a> {
    orders: &'a mut dyn Orders,
    said: Instant,
}

impl<'a> Work<'a> {
    pub(super) fn new(orders: &'a mut dyn Orders) -> Self {
        Self {
            orders,
            said: Instant::now(),
        }
    }

    /// Once before each piece of it, or as often as it is looked at.
    pub(super) fn step(&mut self) -> Result<()> {
        self.orders.interrupted()?;
        self.goes_on()
    }

    /// Something was done.
    fn goes_on(&mut self) -> Result<()> {
        if self.said.elapsed() >= GOES_ON {
            self.said = Instant::now();
            let words = serde_json::to_vec(&Answer::<()>::Working)?;
            ensure!(self.orders.answer(words), "whoever ordered it is gone");
        }
        Ok(())
    }

    /// As a kernel is watched: work requests that were executed since are something that was done.
    pub(super) fn watch(mut self) -> impl FnMut(u64) -> Result<()> {
        let mut seen = 0;
        move |executed| {
            self.orders.interrupted()?;
            if std::mem::replace(&mut seen, executed) != executed {
                self.goes_on()?;
            }
            Ok(())
        }
    }
}
