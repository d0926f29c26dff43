//! When a wait ends. `Instant + Duration` panics when the sum does not fit, and `Duration::MAX` is how people write "for ever".

use std::time::{Duration, Instant};

/// Longer than any process lives, and far inside what an [`Instant`] can hold.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The instant `timeout` from now; a time-out of more than a century ends in a century.
#[must_use]
pub fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOR_EVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_ever_is_a_time_out_too() {
        let now = Instant::now();
        assert!(deadline(Duration::MAX) > now + Duration::from_secs(86_400));
        assert!(deadline(Duration::ZERO) >= now);
    }
}
