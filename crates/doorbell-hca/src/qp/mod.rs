//! Queue pairs as their owner sees them: configuration, handle, state, counters.
//! The engine's own half lives in `engine`; the two meet in a shared block of atomics and in messages to the owning core.

mod config;
mod handle;
pub(crate) mod shared;
mod signals;

pub use config::{CqConfig, DoorbellWord, OnError, QpConfig, RqConfig};
pub use handle::HcaQp;
pub use shared::{QpCounters, QpState};
pub use signals::{RELEASED, Signals, released};
