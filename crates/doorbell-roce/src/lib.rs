//! RoCEv2 transport, Reliable Connection and Unreliable Connection, as a state machine: no sockets, no clock, no threads.
//!
//! A [`Connection`] is one QP's requester and responder. Whoever drives it
//!
//! * gives it work ([`Connection::post`]) and takes what became of it ([`Connection::poll_event`]),
//! * gives it the packets that arrived ([`Connection::handle`]) and sends what it wants sent ([`Connection::transmit`]),
//! * tells it the time, in nanoseconds since anything, and calls it again at [`Connection::timeout`].
//!
//! Payload never lies here: it is pulled from and pushed into [`Memory`], at the moment a packet is made or arrives. Memory that is slow to
//! reach (a GPU's, by a copy engine) answers *later*; acknowledgements, and so the peer's completions, wait for it.
//!
//! Source: InfiniBand Architecture Specification volume 1, chapter 9 (9.5 and 9.7: RC, 9.8: UC), and annex A17 for what RoCEv2 changes.
//!
//! What is decided here where the specification leaves a choice:
//!
//! * **AckReq** is set on the last packet of a burst of messages, on every sixteenth message end, and wherever the window would stop otherwise.
//! * **ACKs are coalesced**: all that can be acknowledged when the connection is next asked for a packet is one ACK, never past the answer to
//!   a READ or atomic that is still to be sent.
//! * **READs** go out in pieces of at most a quarter of the window, so that a long answer cannot overrun the requester's receive buffer.
//! * **Time-outs** double from try to try, from an eighth of 4.096 µs · 2^timeout on, or 67 ms (more where few retries share the time). Their sum is
//!   4.096 µs · 2^timeout · (retry count + 1), after which the message fails.
//! * **Congestion**: a CNP (one in 50 µs), a NAK and a time-out halve the window of unacknowledged packets; each acknowledged window gives back
//!   one packet and an eighth.
//! * **Order**: a READ's memory is read when its answer is made, so a WRITE or atomic behind it may be seen by it, as the specification allows;
//!   a fence orders them.
//! * **A refused request** (NAK other than sequence or receiver-not-ready) stops the responder, as the specification has it.

#![forbid(unsafe_code)]

mod config;
mod congestion;
mod connection;
mod counters;
mod memory;
mod message;
mod requester;
mod responder;

pub use config::{Config, ConfigError, Mtu};
pub use connection::Connection;
pub use counters::Counters;
pub use memory::{Access, Atomic, LocalFault, Memory, Received, ReceivedKind, Refusal, Status};
pub use message::{Event, Failure, Message, Op, PostError};
