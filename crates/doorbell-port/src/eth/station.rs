//! What a host does on an Ethernet beside its own traffic: finds neighbours, and answers those who look for it (ARP, neighbour discovery,
//! ICMP echo). Frames in, frames out; no sockets.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use doorbell_wire::roce::net::{
    Arp, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN, Ethernet, Ipv4, Ipv6,
    Neighbour, PROTOCOL_ICMP, PROTOCOL_ICMPV6, checksum,
};

pub(super) type Mac = [u8; 6];

/// To everyone.
pub(super) const BROADCAST: Mac = [0xff; 6];

/// Neighbours that are remembered. Who asks for us is remembered too, and must not fill our memory.
const NEIGHBOURS: usize = 4096;

/// What a frame was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Perhaps a packet for the port.
    Data,
    /// Dealt with, or not for us.
    Done,
    /// It carries a VLAN tag.
    Vlan,
}

/// Our place on an Ethernet.
#[derive(Debug)]
pub(super) struct Station {
    pub(super) mac: Mac,
    pub(super) ip: IpAddr,
    /// Nobody else answers for our address.
    pub(super) answers: bool,
    neighbours: HashMap<IpAddr, Mac>,
}

impl Station {
    pub(super) fn new(mac: Mac, ip: IpAddr, answers: bool) -> Self {
        Self {
            mac,
            ip,
            answers,
            neighbours: HashMap::new(),
        }
    }

    pub(super) fn neighbour(&self, ip: IpAddr) -> Option<Mac> {
        self.neighbours.get(&ip).copied()
    }

    pub(super) fn learn(&mut self, ip: IpAddr, mac: Mac) {
        if self.neighbours.len() < NEIGHBOURS || self.neighbours.contains_key(&ip) {
            self.neighbours.insert(ip, mac);
        }
    }

    /// The frame that asks who has `ip`. It also tells that host where we are.
    pub(super) fn question(&self, ip: IpAddr) -> Vec<u8> {
        match (self.ip, ip) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                let arp = Arp {
                    operation: 1,
                    sender_mac: self.mac,
                    sender_ip: ours.octets(),
                    target_mac: [0; 6],
                    target_ip: theirs.octets(),
                };
                self.frame(BROADCAST, ETHERTYPE_ARP, &[&arp.emit()])
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => {
                // The solicited-node group of the address, and its hardware address (RFC 4291 2.7.1, RFC 2464 7).
                let o = theirs.octets();
                let group = Ipv6Addr::new(
                    0xff02,
                    0,
                    0,
                    0,
                    0,
                    1,
                    0xff00 | u16::from(o[13]),
                    u16::from_be_bytes([o[14], o[15]]),
                );
                let mac = [0x33, 0x33, 0xff, o[13], o[14], o[15]];
                self.discovery(ours, group, mac, false, theirs)
            }
            _ => Vec::new(),
        }
    }

    fn discovery(
        &self,
        src: Ipv6Addr,
        dst: Ipv6Addr,
        to: Mac,
        advertisement: bool,
        target: Ipv6Addr,
    ) -> Vec<u8> {
        let ip = Ipv6 {
            next_header: PROTOCOL_ICMPV6,
            hop_limit: 255,
            src: src.octets(),
            dst: dst.octets(),
            ..Ipv6::default()
        };
        let message = Neighbour {
            advertisement,
            target: target.octets(),
            mac: Some(self.mac),
        };
        let header = ip.emit(Neighbour::LEN as u16);
        self.frame(to, ETHERTYPE_IPV6, &[&header, &message.emit(&ip)])
    }

    fn frame(&self, dst: Mac, ethertype: u16, parts: &[&[u8]]) -> Vec<u8> {
        let header = Ethernet {
            dst,
            src: self.mac,
            ethertype,
        };
        let mut frame = header.emit().to_vec();
        for part in parts {
            frame.extend_from_slice(part);
        }
        frame
    }

    /// Looks at a frame that arrived; an answer to it is appended to `answers`.
    pub(super) fn see(&mut self, frame: &[u8], answers: &mut Vec<Vec<u8>>) -> Seen {
        let Some((ethernet, rest)) = Ethernet::parse(frame) else {
            return Seen::Done;
        };
        match ethernet.ethertype {
            ETHERTYPE_VLAN => return Seen::Vlan,
            ETHERTYPE_ARP => self.see_arp(rest, answers),
            ETHERTYPE_IPV4 => {
                if rest.get(9) != Some(&PROTOCOL_ICMP) {
                    return Seen::Data;
                }
                self.see_icmp(&ethernet, rest, answers);
            }
            ETHERTYPE_IPV6 => {
                if rest.get(6) != Some(&PROTOCOL_ICMPV6) {
                    return Seen::Data;
                }
                self.see_icmpv6(&ethernet, rest, answers);
            }
            _ => {}
        }
        Seen::Done
    }

    fn see_arp(&mut self, rest: &[u8], answers: &mut Vec<Vec<u8>>) {
        let IpAddr::V4(ours) = self.ip else { return };
        let Some(arp) = Arp::parse(rest) else { return };
        if arp.target_ip != ours.octets() || arp.sender_ip == ours.octets() {
            return;
        }
        self.learn(IpAddr::from(arp.sender_ip), arp.sender_mac);
        if arp.operation == 1 && self.answers {
            let reply = Arp {
                operation: 2,
                sender_mac: self.mac,
                sender_ip: ours.octets(),
                target_mac: arp.sender_mac,
                target_ip: arp.sender_ip,
            };
            answers.push(self.frame(arp.sender_mac, ETHERTYPE_ARP, &[&reply.emit()]));
        }
    }

    fn see_icmp(&self, ethernet: &Ethernet, rest: &[u8], answers: &mut Vec<Vec<u8>>) {
        let IpAddr::V4(ours) = self.ip else { return };
        let Some((ip, message)) = Ipv4::parse(rest) else {
            return;
        };
        // An echo request to us, undamaged.
        if !self.answers
            || ip.dst != ours.octets()
            || message.first() != Some(&8)
            || checksum(0, message) != 0
        {
            return;
        }
        let mut reply = message.to_vec();
        reply[0] = 0;
        reply[2..4].fill(0);
        let sum = checksum(0, &reply);
        reply[2..4].copy_from_slice(&sum.to_be_bytes());
        let header = Ipv4 {
            protocol: PROTOCOL_ICMP,
            src: ours.octets(),
            dst: ip.src,
            ..Ipv4::default()
        };
        answers.push(self.frame(
            ethernet.src,
            ETHERTYPE_IPV4,
            &[&header.emit(reply.len() as u16), &reply],
        ));
    }

    fn see_icmpv6(&mut self, ethernet: &Ethernet, rest: &[u8], answers: &mut Vec<Vec<u8>>) {
        let IpAddr::V6(ours) = self.ip else { return };
        let Some((ip, message)) = Ipv6::parse(rest) else {
            return;
        };
        if checksum(ip.pseudo_sum(message.len() as u32), message) != 0 {
            return;
        }
        let src = Ipv6Addr::from(ip.src);
        if let Some(neighbour) = Neighbour::parse(message) {
            // From the same link only (RFC 4861 7.1).
            if ip.hop_limit != 255 {
                return;
            }
            let target = Ipv6Addr::from(neighbour.target);
            if neighbour.advertisement {
                if let Some(mac) = neighbour.mac {
                    self.learn(IpAddr::V6(target), mac);
                }
            } else if target == ours && self.answers && !src.is_unspecified() {
                let mac = neighbour.mac.unwrap_or(ethernet.src);
                self.learn(IpAddr::V6(src), mac);
                answers.push(self.discovery(ours, src, mac, true, ours));
            }
        } else if message.first() == Some(&128) && ip.dst == ours.octets() && self.answers {
            let header = Ipv6 {
                next_header: PROTOCOL_ICMPV6,
                src: ours.octets(),
                dst: ip.src,
                ..Ipv6::default()
            };
            let mut reply = message.to_vec();
            reply[0] = 129;
            reply[2..4].fill(0);
            let sum = checksum(header.pseudo_sum(reply.len() as u32), &reply);
            reply[2..4].copy_from_slice(&sum.to_be_bytes());
            answers.push(self.frame(
                ethernet.src,
                ETHERTYPE_IPV6,
                &[&header.emit(reply.len() as u16), &reply],
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(a: &str, b: &str) -> (Station, Station) {
        (
            Station::new([2, 0, 0, 0, 0, 1], a.parse().unwrap(), true),
            Station::new([2, 0, 0, 0, 0, 2], b.parse().unwrap(), true),
        )
    }

    #[test]
    fn neighbours_find_each_other() {
        for (a, b) in [("192.0.2.1", "192.0.2.2"), ("fd00::1", "fd00::2")] {
            let (mut a, mut b) = pair(a, b);
            let mut answers = Vec::new();
            assert_eq!(b.see(&a.question(b.ip), &mut answers), Seen::Done);
            assert_eq!(b.neighbour(a.ip), Some(a.mac));
            assert_eq!(answers.len(), 1);
            assert_eq!(a.see(&answers[0], &mut Vec::new()), Seen::Done);
            assert_eq!(a.neighbour(b.ip), Some(b.mac));
            // For another host, or where the kernel answers: silence.
            answers.clear();
            let other = if a.ip.is_ipv4() {
                "192.0.2.9"
            } else {
                "fd00::9"
            };
            b.see(&a.question(other.parse().unwrap()), &mut answers);
            b.answers = false;
            b.see(&a.question(b.ip), &mut answers);
            assert!(answers.is_empty());
        }
    }

    #[test]
    fn echo_is_answered_and_damage_is_not() {
        let (mut a, b) = pair("192.0.2.1", "192.0.2.2");
        let mut message = vec![8, 0, 0, 0, 1, 2, 3, 4, 5];
        let sum = checksum(0, &message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let header = Ipv4 {
            protocol: PROTOCOL_ICMP,
            src: [192, 0, 2, 2],
            dst: [192, 0, 2, 1],
            ..Ipv4::default()
        };
        let mut ping = b.frame(a.mac, ETHERTYPE_IPV4, &[&header.emit(9), &message]);
        let mut answers = Vec::new();
        assert_eq!(a.see(&ping, &mut answers), Seen::Done);
        let (ethernet, rest) = Ethernet::parse(&answers[0]).unwrap();
        let (ip, pong) = Ipv4::parse(rest).unwrap();
        assert_eq!((ethernet.dst, ip.dst, pong[0]), (b.mac, [192, 0, 2, 2], 0));
        assert_eq!(checksum(0, pong), 0);
        let last = ping.len() - 1;
        ping[last] ^= 1;
        answers.clear();
        a.see(&ping, &mut answers);
        assert!(answers.is_empty());
    }

    #[test]
    fn tags_are_refused_and_rubbish_does_no_harm() {
        let (mut a, _) = pair("192.0.2.1", "192.0.2.2");
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
        assert_eq!(a.see(&frame, &mut Vec::new()), Seen::Vlan);
        for ethertype in [ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, 0x1234] {
            for len in 0..60 {
                let mut frame = vec![0xa5; len];
                if let Some(place) = frame.get_mut(12..14) {
                    place.copy_from_slice(&ethertype.to_be_bytes());
                }
                for next in [PROTOCOL_ICMP, PROTOCOL_ICMPV6] {
                    for at in [20, 23] {
                        if let Some(byte) = frame.get_mut(at) {
                            *byte = next;
                        }
                    }
                    a.see(&frame, &mut Vec::new());
                }
            }
        }
        assert!(a.neighbours.len() < 3);
    }
}
