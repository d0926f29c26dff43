//! One line a packet, for people.

use std::fmt;
use std::io::Write;
use std::net::SocketAddr;
use std::time::Instant;

use doorbell_wire::roce::Packet;

use super::pass_on;
use crate::Port;
use crate::arrived::RecvBatch;
use crate::batch::SendBatch;
use crate::counters::PortCounters;
use crate::describe::Description;
use crate::error::Result;

/// A port that writes a line for every packet: seconds since it was opened, direction, peer, what it is.
pub struct Tracer<P, W> {
    inner: P,
    out: W,
    start: Instant,
}

impl<P: Port, W: Write + Send> Tracer<P, W> {
    /// Wraps a port. Lines go to `out`; what that refuses is lost.
    pub fn new(inner: P, out: W) -> Self {
        Self {
            inner,
            out,
            start: Instant::now(),
        }
    }

    fn line(&mut self, arrow: &str, peer: SocketAddr, tos: u8, bytes: &[u8]) {
        let at = self.start.elapsed().as_secs_f64();
        let ecn = ["", " ect1", " ect0", " CE"][usize::from(tos & 3)];
        let what = match Packet::parse(bytes) {
            Ok(packet) => summary(&packet),
            Err(error) => format!("not a packet: {error}"),
        };
        let _ = writeln!(self.out, "{at:12.6} {arrow} {peer}{ecn} {what}");
    }
}

/// The packet in words.
fn summary(packet: &Packet<'_>) -> String {
    let bth = &packet.bth;
    let mut text = format!(
        "qp {:#08x} psn {:06x} {:?} {:?} {} B",
        bth.dest_qp,
        bth.psn.get(),
        bth.opcode,
        packet.ext,
        packet.payload.len()
    );
    if bth.ack_req {
        text.push_str(" ackreq");
    }
    text
}

impl<P: Port, W: Write + Send> Port for Tracer<P, W> {
    pass_on!();

    fn send(&mut self, batch: &mut SendBatch) -> Result<usize> {
        let waiting: Vec<_> = batch
            .iter()
            .map(|p| (p.path.peer(), p.path.tos, p.bytes.to_vec()))
            .collect();
        let sent = self.inner.send(batch)?;
        for (peer, tos, bytes) in waiting.into_iter().take(sent) {
            self.line("->", peer, tos, &bytes);
        }
        Ok(sent)
    }

    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        let came = self.inner.recv(batch)?;
        for packet in batch.iter() {
            self.line("<-", packet.src, packet.tos, packet.bytes);
        }
        Ok(came)
    }

    fn next_due(&self) -> Option<Instant> {
        self.inner.next_due()
    }

    fn counters(&self) -> PortCounters {
        self.inner.counters()
    }

    fn describe(&self) -> Description {
        let mut description = self.inner.describe();
        description
            .choices
            .push(("trace", "a line for each packet".to_owned()));
        description
    }
}

impl<P: fmt::Debug, W> fmt::Debug for Tracer<P, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
