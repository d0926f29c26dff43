//! The second host: greeted once before anything goes to it, as `perf` greets it, so that what is wrong with it is said once and by its name.

use std::time::{Duration, Instant};

use anyhow::Result;
use doorbell::{Config, Device, GpuSelect, Greeting, Line};
use serde::Serialize;

use crate::perf::pipe::Partner;
use crate::perf::remote::OVER_VERBS;

/// What is known of the second host.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Peer {
    /// As it was named.
    pub(super) name: String,
    /// Who it said it is: its host and release.
    pub(super) says: Option<String>,
    /// Why nothing goes to it, or nothing any more.
    pub(super) why: Option<String>,
}

impl Peer {
    /// Greets it, and takes leave.
    pub(super) fn greet(name: &str, timeout: Duration) -> Self {
        let (says, why) = match greet(name, timeout) {
            Ok(says) => (Some(says), None),
            Err(e) => (None, Some(crate::words(&e))),
        };
        Self {
            name: name.to_owned(),
            says,
            why,
        }
    }

    /// After something that failed: is it still there?
    pub(super) fn greet_again(&mut self, timeout: Duration) {
        if let Err(e) = greet(&self.name, timeout) {
            self.why = Some(crate::words(&e));
        }
    }

    /// In a line.
    pub(super) fn describe(&self) -> String {
        match (&self.why, &self.says) {
            (None, says) => format!(
                "second host {}: {}",
                self.name,
                says.as_deref().unwrap_or("unknown")
            ),
            (Some(why), None) => format!("second host {}: not reached: {why}", self.name),
            (Some(why), Some(_)) => format!("second host {}: lost: {why}", self.name),
        }
    }
}

/// One time-out for all of it. The other side opens its RDMA device for this, and says so if it cannot.
fn greet(name: &str, timeout: Duration) -> Result<String> {
    // Before it is dialled: a server hears whoever dials for a moment only.
    let own = Device::builder()
        .config(Config {
            gpu: Some(GpuSelect::Host),
            ..Config::default()
        })
        .open()?;
    let greeting = Greeting {
        job: String::new(),
        purpose: format!("hwtest{OVER_VERBS}"),
        hca: own.provider().id(),
        offer: None,
    };
    let until = Instant::now() + timeout;
    let left = || until.saturating_duration_since(Instant::now());
    let channel = Line::dial(name, timeout)?.call(&greeting, left())?;
    let says = channel.introduction().to_string();
    Partner::over(channel, timeout).part(true)?;
    Ok(says)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_not_there_and_one_that_is_mute_cost_a_time_out() {
        // Nobody listens on a port that was just given back.
        let listener = || std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let free = listener().local_addr().expect("its address").to_string();
        let mute = listener();
        let at = mute.local_addr().expect("its address").to_string();
        for name in [&free, &at] {
            let peer = Peer::greet(name, Duration::from_millis(300));
            let why = peer.why.clone().expect("a reason");
            assert!(why.contains(name.as_str()), "{why}");
            assert!(peer.describe().contains("not reached"), "{why}");
        }
    }
}
