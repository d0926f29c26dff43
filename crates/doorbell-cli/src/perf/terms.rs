//! On which terms the second process of a run does what it is ordered: orders over a network are a stranger's.
//!
//! Whoever can reach a server's port may ask it for memory. All clients together get so much and no more, each for as long as it uses it; who asks for
//! more is told so, and the others go on. A process that the initiator started itself, or that a launcher started beside it, has no such limit.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};

use crate::units;

/// What those who are served may have.
#[derive(Clone)]
pub(crate) struct Terms {
    /// Memory, together; `None`: as much as there is.
    memory: Option<Arc<Memory>>,
}

struct Memory {
    most: u64,
    taken: Mutex<u64>,
}

/// Memory that somebody has; it is free again when this goes.
pub(crate) struct Share {
    of: Option<Arc<Memory>>,
    bytes: u64,
}

impl Terms {
    /// Of a process of the same user's run.
    pub(crate) fn own() -> Self {
        Self { memory: None }
    }

    /// Of a server for anybody: clients have `most` bytes together.
    pub(crate) fn of_server(most: u64) -> Self {
        Self {
            memory: Some(Arc::new(Memory {
                most,
                taken: Mutex::new(0),
            })),
        }
    }

    /// Takes so many bytes.
    pub(crate) fn take(&self, bytes: u64) -> Result<Share> {
        if let Some(memory) = &self.memory {
            let mut taken = memory.taken.lock().unwrap_or_else(PoisonError::into_inner);
            let (most, others) = (memory.most, *taken);
            ensure!(
                bytes <= most.saturating_sub(others),
                "{} bytes of memory, beside {} that clients have: this server gives them {} together; ask for less, come later, or raise its --memory",
                units::grouped(bytes),
                units::grouped(others),
                units::grouped(most)
            );
            *taken = others + bytes;
        }
        Ok(Share {
            of: self.memory.clone(),
            bytes,
        })
    }

    /// Sessions and memory of the shared memory link are for processes of one run: whoever comes by packets has no use for them, and would have this
    /// process dial sockets of its choice.
    pub(crate) fn one_host(&self) -> Result<()> {
        ensure!(
            self.memory.is_none(),
            "a server is reached by packets: shared memory is for a run on one host, without --connect"
        );
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(memory) = &self.of {
            *memory.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_share_a_limit_and_give_back_what_they_had() {
        let terms = Terms::of_server(100);
        let first = terms.take(60).expect("60 of 100");
        let second = terms.clone().take(40).expect("40 of 100");
        let words = |bytes| terms.take(bytes).err().expect("a refusal").to_string();
        let text = words(1);
        assert!(
            text.contains("beside 100") && text.contains("--memory"),
            "{text}"
        );
        drop(first);
        assert!(words(61).contains("beside 40"));
        assert!(words(u64::MAX).contains("--memory"));
        let again = terms.take(60).expect("what was given back");
        drop((second, again));
        assert!(terms.take(100).is_ok());
        assert!(Terms::own().take(u64::MAX).is_ok());
    }
}
