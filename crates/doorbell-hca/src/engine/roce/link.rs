//! A QP's connection, and how a WQE becomes one of its messages.

use std::net::IpAddr;

use doorbell_port::{LONG_PAYLOAD, Path, PathRequest, Port};
use doorbell_roce::{Connection, Message, Mtu, Op, PostError};
use doorbell_wire::roce::Transport;
use doorbell_wire::{Cqn, Ctrl, Local, Payload, Piece, Request};

use super::flight::{Bytes, Flight, InFlight, LIMIT};
use super::memory::QpMemory;
use super::pace::Pace;
use super::ready::Place;
use crate::engine::Cx;
use crate::engine::exec::{MAX_MESSAGE, Outcome};
use crate::engine::keys::Use;
use crate::engine::qp::{ColdQp, EngineQp, Park, Target};
use crate::error::{HcaError, Result};
use crate::fault::Fault;
use crate::mem::Access;
use crate::roce::{RoceReceiver, RoceTarget, plain};

/// How long finding the way to a peer may take (address resolution).
const RESOLUTION: std::time::Duration = std::time::Duration::from_secs(1);

// The transport and the port mean the same by long packets.
const _: () = assert!(Mtu::Long.bytes() as usize == LONG_PAYLOAD);

/// A connected QP's other end.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) connection: Connection,
    pub(super) pace: Pace,
    /// The way to the peer; nothing if packets come from anybody.
    pub(super) path: Option<Path>,
    /// Packets from elsewhere are a stranger's.
    pub(super) peer: Option<IpAddr>,
    /// Number of its queue pair.
    pub(in crate::engine) peer_qpn: u32,
    pub(super) access: Access,
    /// The peer is a port of ours, whose IPv4 identifications are known as far as they need to be.
    pub(super) exact: bool,
    /// Nobody is told what became of a request.
    pub(super) unreliable: bool,
    /// Among those that have something to do.
    pub(super) place: Place,
}

impl Link {
    /// Finds the way to the peer.
    pub(in crate::engine) fn new(port: &mut dyn Port, target: &RoceTarget) -> Result<Self> {
        let bad = |what: String| HcaError::BadConfig { what };
        let path = port
            .path(&PathRequest {
                trains: target.segments,
                light: target.light,
                long: target.connection.path_mtu == Mtu::Long,
                deadline: RESOLUTION,
                ..PathRequest::new(target.peer)
            })
            .map_err(|e| bad(format!("the way to {}: {e}", target.peer)))?;
        let fits = doorbell_port::path_mtu(path.mtu());
        let wanted = target.connection.path_mtu.bytes() as usize;
        if wanted > fits {
            return Err(bad(format!(
                "packets of path MTU {wanted} do not fit the way to {} (at most {fits}): agree on a smaller one",
                target.peer
            )));
        }
        let config = doorbell_roce::Config {
            messages: LIMIT,
            ..target.connection.clone()
        };
        let connection = Connection::new(&config).map_err(|e| bad(e.to_string()))?;
        Ok(Self {
            connection,
            pace: Pace::default(),
            path: Some(path),
            peer: Some(plain(target.peer.ip())),
            peer_qpn: target.connection.dest_qpn,
            exact: target.segments,
            access: target.access,
            unreliable: config.transport == Transport::Uc,
            place: Place::default(),
        })
    }

    /// Receives from anybody, and sends nothing.
    pub(in crate::engine) fn receiver(port: &dyn Port, of: &RoceReceiver) -> Result<Self> {
        let bad = |what: String| HcaError::BadConfig { what };
        let (wanted, fits) = (
            of.path_mtu.bytes() as usize,
            doorbell_port::path_mtu(port.mtu()),
        );
        if wanted > fits {
            return Err(bad(format!(
                "packets of path MTU {wanted} do not fit the port (at most {fits})"
            )));
        }
        let config = doorbell_roce::Config {
            transport: Transport::Uc,
            path_mtu: of.path_mtu,
            ..doorbell_roce::Config::default()
        };
        Ok(Self {
            connection: Connection::new(&config).map_err(|e| bad(e.to_string()))?,
            pace: Pace::default(),
            path: None,
            peer: None,
            peer_qpn: 0,
            exact: false,
            access: of.access,
            unreliable: true,
            place: Place::default(),
        })
    }
}

impl ColdQp {
    /// The connection of a QP that has one, and the memory behind it.
    pub(super) fn link<'a, 'c>(
        &'a mut self,
        cx: &'a mut Cx<'c>,
    ) -> Option<(&'a mut Link, QpMemory<'a, 'c>)> {
        let Target::Roce(link) = &mut self.target else {
            return None;
        };
        let memory = QpMemory {
            cx,
            shared: &self.shared,
            flight: &self.flight,
            access: link.access,
            staged: &mut self.staged,
            lends: false,
            lent: None,
        };
        Some((link, memory))
    }
}

impl ColdQp {
    /// The memory of a QP's messages, whatever carries them.
    pub(in crate::engine) fn memory<'a, 'c>(&'a mut self, cx: &'a mut Cx<'c>) -> QpMemory<'a, 'c> {
        QpMemory {
            cx,
            shared: &self.shared,
            flight: &self.flight,
            access: Access::NONE,
            staged: &mut self.staged,
            lends: false,
            lent: None,
        }
    }
}

impl Flight {
    /// First slot and control segment of the oldest.
    pub(in crate::engine) fn first(&self) -> Option<(u64, Ctrl)> {
        self.front().map(|f| (f.at, f.ctrl))
    }
}

impl EngineQp {
    /// Hands a request to the connection. Every local piece is checked first; the rest is the peer's to check.
    pub(in crate::engine) fn post(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        request: Request<'_>,
    ) -> Result<Outcome, Fault> {
        if self.cold.flight.is_full() {
            return Ok(self.hold());
        }
        let (op, bytes, len) = match request {
            Request::Nop => return Ok(self.in_order(ctrl, 0)),
            Request::Wait { index, cqn } => return self.wait_in_order(cx, ctrl, index, cqn),
            Request::Dump { local } => {
                self.locate(cx, Use::Source, local.key, local.addr, u64::from(local.len))?;
                return Ok(self.in_order(ctrl, local.len));
            }
            Request::Write { remote, local, imm } => {
                let (bytes, len) = self.gathered(cx, local, Use::Source)?;
                let op = Op::Write {
                    va: remote.addr,
                    rkey: remote.key.0,
                    imm,
                };
                (op, bytes, len)
            }
            Request::Send { local, imm } => {
                let (bytes, len) = self.gathered(cx, local, Use::Source)?;
                (Op::Send { imm }, bytes, len)
            }
            Request::Read { remote, local } => {
                let (bytes, len) = self.gathered(cx, local, Use::Sink)?;
                let op = Op::Read {
                    va: remote.addr,
                    rkey: remote.key.0,
                };
                (op, bytes, len)
            }
            Request::FetchAdd { remote, local, add } => {
                let op = Op::FetchAdd {
                    va: remote.addr,
                    rkey: remote.key.0,
                    add,
                };
                (op, self.sink(cx, local)?, 8)
            }
            Request::CompareSwap {
                remote,
                local,
                swap,
                compare,
            } => {
                let op = Op::CompareSwap {
                    va: remote.addr,
                    rkey: remote.key.0,
                    compare,
                    swap,
                };
                (op, self.sink(cx, local)?, 8)
            }
            // InfiniBand's transport has no masked atomics.
            Request::MaskedFetchAdd { .. } | Request::MaskedCompareSwap { .. } => {
                return Err(Fault::Unsupported);
            }
        };
        if let Op::FetchAdd { va, .. } | Op::CompareSwap { va, .. } = op
            && !va.is_multiple_of(8)
        {
            return Err(Fault::Misaligned);
        }
        let Target::Roce(link) = &mut self.cold.target else {
            return Err(Fault::NotConnected);
        };
        if link.path.is_none() {
            return Err(Fault::NotConnected);
        }
        let message = Message {
            token: self.exec,
            op,
            len,
            fence: ctrl.fenced(),
            solicited: ctrl.solicited(),
        };
        match link.connection.post(message) {
            Ok(()) => link.pace.posted = true,
            Err(PostError::Full) => return Ok(self.hold()),
            // What became of it is told as an event.
            Err(PostError::Failed) => return Ok(self.hold()),
            Err(PostError::Unsupported) => return Err(Fault::Unsupported),
            Err(PostError::Length(_)) => return Err(Fault::BadLength),
        }
        cx.roused.push(cx.slot);
        self.cold.flight.push(InFlight {
            at: self.exec,
            ctrl,
            byte_cnt: len,
            bytes,
            local: false,
            source: !op.is_read_like(),
        });
        Ok(Outcome::Issued)
    }

    /// No room: to be looked at again.
    pub(in crate::engine) fn hold(&mut self) -> Outcome {
        self.park = Some(Park::Copies);
        Outcome::Parked
    }

    /// Nothing to send: complete when all before it is.
    pub(in crate::engine) fn in_order(&mut self, ctrl: Ctrl, byte_cnt: u32) -> Outcome {
        if self.cold.flight.is_empty() {
            return Outcome::Complete(byte_cnt);
        }
        self.cold.flight.push(InFlight {
            at: self.exec,
            ctrl,
            byte_cnt,
            bytes: Bytes::Nothing,
            local: true,
            source: false,
        });
        Outcome::Issued
    }

    /// WAIT: complete when all before it is, and that CQ has completed so far.
    pub(in crate::engine) fn wait_in_order(
        &mut self,
        cx: &Cx<'_>,
        ctrl: Ctrl,
        index: u32,
        cqn: Cqn,
    ) -> Result<Outcome, Fault> {
        Ok(match self.waits(cx, index, cqn)? {
            true => Outcome::Parked,
            false => self.in_order(ctrl, 0),
        })
    }

    /// Where the old value of an atomic goes.
    fn sink(&mut self, cx: &mut Cx<'_>, local: Local) -> Result<Bytes, Fault> {
        if local.len != 8 {
            return Err(Fault::BadLength);
        }
        self.locate(cx, Use::Sink, local.key, local.addr, 8)?;
        Ok(Bytes::One(local))
    }

    /// A payload as the flight keeps it, and its length.
    pub(in crate::engine) fn gathered(
        &mut self,
        cx: &mut Cx<'_>,
        payload: Payload<'_>,
        usage: Use,
    ) -> Result<(Bytes, u32), Fault> {
        let total = payload.len();
        if total > MAX_MESSAGE {
            return Err(Fault::BadLength);
        }
        let len = total as u32;
        if let Payload::Inline(inline) = &payload {
            return Ok((Bytes::inline(inline.len(), inline.bytes()), len));
        }
        let mut one = None;
        let mut many = Vec::new();
        for piece in payload.pieces() {
            match piece {
                // A piece of no bytes opens no key.
                Piece::Local(local) if local.len == 0 => {}
                Piece::Local(local) => {
                    self.locate(cx, usage, local.key, local.addr, u64::from(local.len))?;
                    match one.replace(local) {
                        None => {}
                        Some(before) => many.push(before),
                    }
                }
                Piece::Inline(inline) if inline.is_empty() => {}
                // Inline and pieces in one WQE.
                Piece::Inline(_) => return Err(Fault::BadInline),
            }
        }
        let bytes = match (one, many.is_empty()) {
            (None, _) => Bytes::Nothing,
            (Some(one), true) => Bytes::One(one),
            (Some(last), false) => {
                many.push(last);
                Bytes::Many(many.into_boxed_slice())
            }
        };
        Ok((bytes, len))
    }
}
