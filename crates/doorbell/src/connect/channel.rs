//! The connection that comes of it: messages in order, both ways, and signs of life.

use std::fmt;
use std::time::{Duration, Instant};

use super::Connected;
use super::error::{ConnectError, Refusal, RefusalKind};
use super::frame::{Kind, MAX_MESSAGE, Wrong, refusal_body};
use super::greeting::{Agreed, Introduction};
use super::keeper::Keeper;
use super::line::PARTING;
use crate::endpoint::{Endpoint, pack_endpoints, unpack_endpoints};
use crate::{Error, Result};

/// A connection between two processes that know each other: messages in order, both ways.
pub struct Channel {
    keeper: Keeper,
    other: Introduction,
    agreed: Option<Agreed>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("peer", &self.keeper.peer())
            .field("other", &self.other)
            .finish_non_exhaustive()
    }
}

impl Channel {
    pub(super) fn new(keeper: Keeper, other: Introduction, agreed: Option<Agreed>) -> Self {
        Self {
            keeper,
            other,
            agreed,
        }
    }

    /// Who the other side is.
    pub fn introduction(&self) -> &Introduction {
        &self.other
    }

    /// What holds between the two RoCE ports; `None` if there are none.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// The other side's address, as errors name it.
    pub fn peer(&self) -> &str {
        self.keeper.peer()
    }

    /// Sends one message, at most [`MAX_MESSAGE`] bytes.
    pub fn send(&mut self, message: &[u8], timeout: Duration) -> Connected<()> {
        if message.len() > MAX_MESSAGE {
            return Err(ConnectError::TooLarge {
                len: message.len(),
                max: MAX_MESSAGE,
            });
        }
        self.keeper
            .send(Kind::Data, message, "take a message", timeout)
    }

    /// The next message. Ends sooner than `timeout` when the other side has hung up, said that it ends, or given no sign of life
    /// for so long already.
    pub fn recv(&mut self, timeout: Duration) -> Connected<Vec<u8>> {
        self.keeper.next("send a message", timeout)
    }

    /// Whether a message, or the end of the connection, came within `timeout`. Does not take it.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.keeper.wait(timeout)
    }

    /// Whether the other side has hung up.
    pub fn is_closed(&self) -> bool {
        self.keeper.is_closed()
    }

    /// What is wrong with the connection, for whoever expects no message but depends on the other side: that it hung up, that it
    /// said why it ended, or that it gave no sign of life for longer than `patience` (a second at least).
    pub fn trouble(&self, patience: Duration) -> Option<ConnectError> {
        self.keeper.trouble(patience)
    }

    /// How long ago the last sign of life came.
    pub fn silence(&self) -> Duration {
        self.keeper.silence()
    }

    /// Tells the other side why this one ends, and hangs up. It finds that as [`ConnectError::Ended`].
    pub fn end(self, reason: &str) {
        self.tell_end(reason);
    }

    /// As [`end`](Channel::end), of a side that still has to let go of what the other one uses: to be said before, or the other side's
    /// requests fail first, for reasons that are none. Nothing is to be said after it.
    pub fn tell_end(&self, reason: &str) {
        let refusal = Refusal::new(RefusalKind::Ended, reason);
        // One that cannot be told finds out by the end of the connection.
        let _ = self.keeper.send(
            Kind::Refuse,
            &refusal_body(&refusal),
            "hear the end",
            PARTING,
        );
    }

    /// Both sides give bytes and get the other's; both must call it, in the same order as other messages.
    pub fn exchange(&mut self, mine: &[u8], timeout: Duration) -> Connected<Vec<u8>> {
        let deadline = doorbell_hca::deadline(timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        self.send(&(mine.len() as u64).to_le_bytes(), left())?;
        let head = self.recv(left())?;
        let theirs = <[u8; 8]>::try_from(head.as_slice())
            .ok()
            .map(u64::from_le_bytes)
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n <= MAX_MESSAGE)
            .ok_or_else(|| {
                Wrong::Protocol {
                    found: format!("a first message of {} bytes", head.len()),
                    expected: "exchange() on both sides at the same point".to_owned(),
                }
                .from(self.peer())
            })?;
        // Piece by piece and in turn: two that both send more than the sockets hold would wait for each other.
        const PIECE: usize = 32 << 10;
        let mut got = Vec::new();
        let mut pieces = mine.chunks(PIECE);
        loop {
            let piece = pieces.next();
            if let Some(piece) = piece {
                self.send(piece, left())?;
            }
            if got.len() < theirs {
                got.extend_from_slice(&self.recv(left())?);
            } else if piece.is_none() {
                break;
            }
        }
        got.truncate(theirs);
        Ok(got)
    }

    /// Both sides give descriptions of their queue pairs and memory and get the other's.
    pub fn exchange_endpoints(
        &mut self,
        mine: &[Endpoint],
        timeout: Duration,
    ) -> Result<Vec<Endpoint>> {
        let theirs = self
            .exchange(&pack_endpoints(mine), timeout)
            .map_err(Error::from)?;
        Ok(unpack_endpoints(&theirs)?)
    }

    /// Returns when both sides have called it.
    pub fn barrier(&mut self, timeout: Duration) -> Connected<()> {
        self.exchange(&[], timeout).map(|_| ())
    }
}
