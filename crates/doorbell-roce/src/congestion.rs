//! How many packets may be unacknowledged: additive increase, multiplicative decrease, below the window that was configured.

/// Marks within this time are one event (annex A17.9.3 leaves the pace to the implementation; NICs use 50 µs).
pub(crate) const CNP_INTERVAL_NS: u64 = 50_000;

/// The window's floor. A packet with none behind it in the window is missed by nobody, and only a time-out repairs its loss: with four, a
/// fourth of all losses.
const FLOOR: u32 = 16;

#[derive(Clone, Debug)]
pub(crate) struct Window {
    limit: u32,
    /// Bytes that go with the limit.
    bytes: u32,
    /// Of these, what others leave.
    share: u64,
    now: u32,
    /// Packets acknowledged since the last increase.
    acknowledged: u32,
}

impl Window {
    pub(crate) fn new(limit: u32, bytes: u32) -> Self {
        Self {
            limit,
            bytes,
            share: u64::from(bytes),
            now: limit,
            acknowledged: 0,
        }
    }

    pub(crate) fn packets(&self) -> u32 {
        self.now
    }

    /// Bytes that may be unacknowledged.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = u64::from(self.bytes) * u64::from(self.now) / u64::from(self.limit);
        bytes.min(self.share)
    }

    /// `sending` connections share the bytes, and the others have `others` of them under way.
    pub(crate) fn share(&mut self, sending: u64, others: u64) {
        let all = u64::from(self.bytes);
        self.share = (all / sending.max(1)).min(all.saturating_sub(others));
    }

    /// Not all of the bytes are this connection's.
    pub(crate) fn is_shared(&self) -> bool {
        self.share < u64::from(self.bytes)
    }

    pub(crate) fn acknowledged(&mut self, packets: u32) {
        if self.now == self.limit {
            return;
        }
        self.acknowledged += packets;
        if self.acknowledged >= self.now {
            self.acknowledged = 0;
            self.now = (self.now + 1 + self.now / 8).min(self.limit);
        }
    }

    pub(crate) fn congested(&mut self) {
        self.now = (self.now / 2).max(FLOOR.min(self.limit));
        self.acknowledged = 0;
    }
}
