//! The rules of volume 1, chapter 9, one test each: packets in, packets out, nothing in between but one connection.
//!
//! A test's documentation names the section that its rule is from.

mod captures;
mod congestion;
mod patience;
mod requester;
mod responder;
mod rig;
mod slow;
mod uc;
mod wrap;
