//! What a connection counted, under the names that `rdma statistic` has for the same things.

/// Counters of one connection; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets sent, retransmissions included.
    pub tx_packets: u64,
    /// Packets accepted from the peer, duplicates included.
    pub rx_packets: u64,
    /// Payload bytes sent, retransmissions included.
    pub tx_bytes: u64,
    /// Payload bytes received.
    pub rx_bytes: u64,
    /// WRITE requests (messages) carried out here.
    pub rx_write_requests: u64,
    /// READ requests accepted here.
    pub rx_read_requests: u64,
    /// Atomics executed here.
    pub rx_atomic_requests: u64,
    /// SENDs received here.
    pub rx_send_requests: u64,
    /// Responder: requests that had been seen before.
    pub duplicate_request: u64,
    /// Responder: packets that came before an earlier one; dropped.
    pub out_of_sequence: u64,
    /// Responder: no receive was posted.
    pub out_of_buffer: u64,
    /// Responder: requests refused because of key, range, access or protection domain.
    pub resp_remote_access_errors: u64,
    /// Responder: requests refused because they were malformed or not allowed.
    pub resp_remote_invalid_request: u64,
    /// Responder: requests that failed here.
    pub resp_remote_operational_errors: u64,
    /// Responder, UC: messages dropped because a packet of theirs was missing.
    pub uc_dropped_messages: u64,
    /// Packets that are not part of anything this connection expects; dropped.
    pub unexpected_packets: u64,
    /// Requester: NAKs for a missing packet.
    pub packet_seq_err: u64,
    /// Requester: NAKs because no receive was posted there, with tries left.
    pub rnr_nak_retry_err: u64,
    /// Requester: messages that failed because the peer had no receive for too long.
    pub req_rnr_retries_exceeded: u64,
    /// Requester: an answer to a READ or atomic was missing and is asked for again.
    pub implied_nak_seq_err: u64,
    /// Requester: time-outs.
    pub local_ack_timeout_err: u64,
    /// Requester: messages that failed because the peer did not answer.
    pub req_transport_retries_exceeded: u64,
    /// Requester: NAKs for access.
    pub req_remote_access_errors: u64,
    /// Requester: NAKs for malformed requests.
    pub req_remote_invalid_request: u64,
    /// Requester: answers that do not fit the request.
    pub req_bad_responses: u64,
    /// Packets sent again.
    pub retransmitted_packets: u64,
    /// Packets that a switch marked (ECN, congestion experienced).
    pub np_ecn_marked_roce_packets: u64,
    /// Congestion notifications sent.
    pub np_cnp_sent: u64,
    /// Congestion notifications received and acted on.
    pub rp_cnp_handled: u64,
}

impl Counters {
    /// Name and value of each, in a fixed order.
    pub fn rows(&self) -> [(&'static str, u64); 29] {
        [
            ("tx_packets", self.tx_packets),
            ("rx_packets", self.rx_packets),
            ("tx_bytes", self.tx_bytes),
            ("rx_bytes", self.rx_bytes),
            ("rx_write_requests", self.rx_write_requests),
            ("rx_read_requests", self.rx_read_requests),
            ("rx_atomic_requests", self.rx_atomic_requests),
            ("rx_send_requests", self.rx_send_requests),
            ("duplicate_request", self.duplicate_request),
            ("out_of_sequence", self.out_of_sequence),
            ("out_of_buffer", self.out_of_buffer),
            ("resp_remote_access_errors", self.resp_remote_access_errors),
            (
                "resp_remote_invalid_request",
                self.resp_remote_invalid_request,
            ),
            (
                "resp_remote_operational_errors",
                self.resp_remote_operational_errors,
            ),
            ("uc_dropped_messages", self.uc_dropped_messages),
            ("unexpected_packets", self.unexpected_packets),
            ("packet_seq_err", self.packet_seq_err),
            ("rnr_nak_retry_err", self.rnr_nak_retry_err),
            ("req_rnr_retries_exceeded", self.req_rnr_retries_exceeded),
            ("implied_nak_seq_err", self.implied_nak_seq_err),
            ("local_ack_timeout_err", self.local_ack_timeout_err),
            (
                "req_transport_retries_exceeded",
                self.req_transport_retries_exceeded,
            ),
            ("req_remote_access_errors", self.req_remote_access_errors),
            (
                "req_remote_invalid_request",
                self.req_remote_invalid_request,
            ),
            ("req_bad_responses", self.req_bad_responses),
            ("retransmitted_packets", self.retransmitted_packets),
            (
                "np_ecn_marked_roce_packets",
                self.np_ecn_marked_roce_packets,
            ),
            ("np_cnp_sent", self.np_cnp_sent),
            ("rp_cnp_handled", self.rp_cnp_handled),
        ]
    }
}
