//! The memory that messages come from and go to, seen from the transport.
//!
//! One side belongs to the requester: the local buffers of messages, named by the token they were posted with. The other belongs to the responder:
//! registered regions, named by key and address, and posted receives. Access is checked by the implementor, at every call.

/// When something done to memory can be seen by everybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Already.
    Now,
    /// When [`Memory::settled`] reaches this ticket. Tickets grow from call to call.
    Later(u64),
}

/// Why the responder refuses (the NAK that the peer gets).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Key, range, access right or protection domain.
    Access,
    /// Malformed, or not allowed on this QP.
    Invalid,
    /// It failed here.
    Operational,
}

/// A fault of the requester's own memory, in the implementor's words; it comes back in [`Failure::Local`](crate::Failure::Local).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalFault(pub u32);

/// What a request wants to do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// WRITE.
    Write,
    /// READ.
    Read,
    /// Atomics.
    Atomic,
}

/// An atomic operation on 8 aligned bytes. The word is little-endian here, as hosts and GPUs have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Adds.
    FetchAdd {
        /// What to add.
        add: u64,
    },
    /// Swaps if equal.
    CompareSwap {
        /// The value to compare with.
        compare: u64,
        /// The new value.
        swap: u64,
    },
}

/// What consumed a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedKind {
    /// SEND.
    Send,
    /// WRITE with immediate; the receive's own memory was not used.
    Write,
}

/// A receive that completed well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// By what.
    pub kind: ReceivedKind,
    /// Bytes of the message.
    pub len: u32,
    /// The immediate: four wire bytes read as a big-endian number.
    pub imm: Option<u32>,
    /// The sender asked for an event.
    pub solicited: bool,
}

/// The memory behind one connection.
pub trait Memory {
    /// Copies local bytes of a message into a packet; called again for each retransmission. `Ok(false)`: not to be had yet, ask again.
    ///
    /// # Errors
    /// The message fails with this fault.
    fn load(&mut self, message: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault>;

    /// Will the implementor itself put these bytes of a message behind what [`Connection::transmit`](crate::Connection::transmit) writes, where
    /// [`Memory::load`] would copy them? Asked of packets that go out for the first time and end without padding. After a `true`, `transmit` returns
    /// the length of the headers alone. What is sent again is always loaded: a source that changes while its packet leaves may damage that packet,
    /// but not the copy.
    fn lend(&mut self, message: u64, offset: u32, len: u32) -> bool {
        let _ = (message, offset, len);
        false
    }

    /// Stores what a READ, or an atomic (8 bytes, little-endian), brought back.
    ///
    /// # Errors
    /// The message fails with this fault.
    fn store(&mut self, message: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault>;

    /// May a request touch this range of a region? Asked once a message, before its first byte.
    ///
    /// # Errors
    /// The NAK to send.
    fn check(&mut self, rkey: u32, va: u64, len: u32, access: Access) -> Result<(), Refusal>;

    /// Writes into a region. Rights are checked again: the region may have gone since [`Memory::check`].
    ///
    /// # Errors
    /// The NAK to send; nothing was written.
    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal>;

    /// Reads from a region, after every earlier write of this connection has settled. `rest`: how many bytes from `va` on the answer still
    /// needs, those of `out` included; memory that is slow to reach fetches them in large pieces. `Ok(false)`: not to be had yet, ask again.
    ///
    /// # Errors
    /// The NAK to send.
    fn read(&mut self, rkey: u32, va: u64, rest: u32, out: &mut [u8]) -> Result<bool, Refusal>;

    /// Executes an atomic, in order with the writes before and after it. `id` names it for [`Memory::atomic_result`].
    /// `Ok(None)`: the value before it comes later.
    ///
    /// # Errors
    /// The NAK to send; it was not executed.
    fn atomic(&mut self, id: u64, rkey: u32, va: u64, op: Atomic) -> Result<Option<u64>, Refusal>;

    /// The value before an atomic that had none yet; `Ok(None)`: still not.
    ///
    /// # Errors
    /// The NAK to send.
    fn atomic_result(&mut self, id: u64) -> Result<Option<u64>, Refusal>;

    /// Takes the next posted receive for a message that begins; `false`: none is posted. One message comes at a time, but those whose bytes
    /// have not settled keep theirs until [`Memory::received`].
    fn receive(&mut self) -> bool;

    /// Scatters bytes of a SEND into the receive that was taken.
    ///
    /// # Errors
    /// The NAK to send ([`Refusal::Invalid`] where the message is longer than the receive). The implementor completes the receive in error;
    /// it is not named again.
    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal>;

    /// Completes the oldest receive that was taken and not completed. Everything it announces has settled.
    fn received(&mut self, received: Received);

    /// Gives back the receive that was taken last: its message was lost (UC).
    fn unreceive(&mut self);

    /// Every ticket up to and including this one has settled.
    fn settled(&mut self) -> u64;
}
