//! Sending: one message a train, several messages a call; what goes to a near peer goes through its own socket.

use std::io;
use std::os::fd::AsFd;

use super::UdpPort;
use crate::batch::{SendBatch, Train};
use crate::error::{PortError, Result};
use crate::sys::{self, Control, Message, RawAddr};

/// Messages of one call. More gains nothing: each costs its own trip through the kernel.
const CALL: usize = 16;
/// A light train of so many bytes is copied together: a call with pieces costs more.
const SMALL: usize = 256;

impl UdpPort {
    pub(super) fn send_batch(&mut self, batch: &mut SendBatch) -> Result<usize> {
        let before = batch.len();
        while !batch.is_empty() {
            let outcome = self.send_some(batch);
            match outcome {
                Ok(trains) => self.count_sent(batch, trains),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                        self.counters.sent_full += 1;
                        batch.keep();
                        break;
                    }
                    Some(libc::EINTR) => {}
                    Some(libc::EBADF | libc::ENOTSOCK) => {
                        return Err(PortError::system(
                            format!("sending from UDP port {}", self.local),
                            error,
                        ));
                    }
                    // This device cannot take trains apart: from now on nobody sends it one.
                    Some(libc::EIO | libc::EINVAL)
                        if batch.waiting()[0].count > 1 && !batch.waiting()[0].has_tail() =>
                    {
                        tracing::warn!(port = %self.local, %error, "the kernel refuses trains on this path; packets go one by one");
                        self.can_send_trains = false;
                        batch.take_apart();
                    }
                    other => {
                        let train = batch.waiting()[0];
                        let count = u64::from(train.count);
                        if other == Some(libc::EMSGSIZE) {
                            self.counters.sent_too_long += count;
                        } else {
                            self.counters.sent_refused += count;
                        }
                        tracing::debug!(peer = %train.path.peer, %error, "packets dropped: the kernel refused them");
                        batch.consume(1);
                    }
                },
            }
        }
        Ok(before - batch.len())
    }

    /// One call: how many trains went.
    fn send_some(&self, batch: &SendBatch) -> io::Result<usize> {
        let waiting = batch.waiting();
        let near = |train: &Train| self.near.as_ref().filter(|n| n.serves(&train.path));
        let Some(near) = near(&waiting[0]) else {
            let others = waiting.iter().take_while(|t| near(t).is_none());
            let messages = others.take(CALL).map(|train| Message {
                to: Some(RawAddr::new(train.path.peer)),
                pieces: batch.pieces_of(train),
                count: train.pieces(),
                control: self.control(train),
            });
            return sys::send_messages(self.socket.as_fd(), messages);
        };
        let mut small = [0; SMALL];
        if let Some(bytes) = batch.in_one(&waiting[0], &mut small) {
            return sys::send_one(near.fd(), bytes).map(|()| 1);
        }
        let theirs = waiting.iter().take_while(|t| near.serves(&t.path));
        let messages = theirs.take(CALL).map(|train| Message {
            to: None,
            pieces: batch.pieces_of(train),
            count: train.pieces(),
            control: Control::new(),
        });
        sys::send_messages(near.fd(), messages)
    }

    /// What the kernel has to know of a train.
    fn control(&self, train: &Train) -> Control {
        let mut control = Control::new();
        if self.local.ip().is_unspecified() {
            // A route that changes would change the source address, and with it the ICRC.
            control.push_source(train.path.local.ip());
        }
        if train.path.tos != 0 {
            let tos = i32::from(train.path.tos).to_ne_bytes();
            if self.local.is_ipv4() {
                control.push(libc::IPPROTO_IP, libc::IP_TOS, &tos);
            } else {
                control.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &tos);
            }
        }
        if train.count > 1 && !train.has_tail() {
            let segment = train.segment.to_ne_bytes();
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, &segment);
        }
        control
    }

    fn count_sent(&mut self, batch: &mut SendBatch, trains: usize) {
        let c = &mut self.counters;
        c.sent_calls += 1;
        for train in &batch.waiting()[..trains] {
            c.sent_packets += u64::from(train.count);
            c.sent_bytes += train.len() as u64;
            c.sent_trains += u64::from(train.count > 1);
        }
        batch.consume(trains);
    }
}
