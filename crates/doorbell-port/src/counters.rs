//! What a port counts.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since the port was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct PortCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl PortCounters {
            /// Name and value of each.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets sent.
    sent_packets,
    /// Bytes sent, base header to ICRC.
    sent_bytes,
    /// System calls that sent.
    sent_calls,
    /// Trains of more than one packet that were sent in one piece.
    sent_trains,
    /// Times that the kernel had no room.
    sent_full,
    /// Packets dropped because the kernel refused them (no route, link down, not permitted).
    sent_refused,
    /// Packets dropped because they are longer than the path's MTU is by now.
    sent_too_long,
    /// Packets received with a right ICRC.
    received_packets,
    /// Bytes of those, base header to ICRC.
    received_bytes,
    /// System calls that received something.
    received_calls,
    /// System calls that found nothing.
    received_empty,
    /// Trains received in one piece.
    received_trains,
    /// Packets dropped for a wrong ICRC.
    icrc_errors,
    /// Packets whose ICRC fits an IPv4 identification that could not be seen.
    icrc_explained,
    /// Packets dropped because they are shorter than a base header and an ICRC.
    received_short,
    /// Packets dropped because they are longer than any RoCEv2 packet.
    received_long,
    /// Packets that the kernel dropped because nobody read them in time.
    receive_overruns,
    /// Frames dropped because they carry a VLAN tag.
    vlan_frames,
    /// Packets that fault injection dropped.
    injected_loss,
    /// Packets that fault injection sent twice.
    injected_duplicates,
    /// Packets that fault injection sent late.
    injected_delays,
    /// Packets that fault injection damaged.
    injected_damage,
    /// Packets that a capture could not write.
    capture_lost,
}
