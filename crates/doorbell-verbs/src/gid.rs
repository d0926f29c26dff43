//! GIDs: which addresses a port has, and which of them to use.

use core::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr};

use crate::abi::*;
use crate::device::{Context, PortAttr};
use crate::error::{Result, VerbsError};

/// What kind of packets go by a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// Ethernet frames that are not routed.
    RoceV1,
    /// UDP.
    RoceV2,
    /// The library does not say.
    Unknown,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its index in the port's table.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// What kind.
    pub kind: GidKind,
}

impl GidEntry {
    /// The IP address that it is; `None` on InfiniBand.
    pub fn ip(&self) -> Option<IpAddr> {
        match self.kind {
            GidKind::RoceV2 | GidKind::Unknown => Some(Ipv6Addr::from(self.gid).to_canonical()),
            GidKind::Infiniband | GidKind::RoceV1 => None,
        }
    }

    /// How well it serves: RoCE v2 with an IPv4 address, then with a routable IPv6 one, then link-local, then RoCE v1.
    fn rank(&self) -> u8 {
        let v6 = Ipv6Addr::from(self.gid);
        let local = v6.segments()[0] & 0xffc0 == 0xfe80;
        match self.kind {
            GidKind::RoceV2 if v6.to_ipv4_mapped().is_some() => 0,
            GidKind::RoceV2 if !local => 1,
            GidKind::Unknown if v6.to_ipv4_mapped().is_some() => 2,
            GidKind::RoceV2 => 3,
            GidKind::Unknown | GidKind::Infiniband => 4,
            GidKind::RoceV1 => 5,
        }
    }
}

impl Context {
    /// The addresses of a port, without empty ones.
    ///
    /// # Errors
    /// As for [`Context::port`].
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>> {
        let attr = self.port(port)?;
        let indexes = 0..=attr.gids.clamp(1, 256).saturating_sub(1) as u8;
        Ok(indexes
            .filter_map(|index| self.gid(port, index, &attr))
            .filter(|entry| entry.gid != [0; 16])
            .collect())
    }

    fn gid(&self, port: u8, index: u8, attr: &PortAttr) -> Option<GidEntry> {
        if let Some(query) = self.api().query_gid_ex {
            let mut raw = RawGidEntry::default();
            let (size, port, at) = (size_of::<RawGidEntry>(), u32::from(port), u32::from(index));
            // SAFETY: the context is open; the structure is written.
            let rc = unsafe { query(self.raw(), port, at, &mut raw, 0, size) };
            return (rc == 0).then_some(GidEntry {
                index,
                gid: raw.gid.0,
                kind: match raw.gid_type {
                    gid_type::IB => GidKind::Infiniband,
                    gid_type::ROCE_V1 => GidKind::RoceV1,
                    gid_type::ROCE_V2 => GidKind::RoceV2,
                    _ => GidKind::Unknown,
                },
            });
        }
        let mut gid: Gid = [0; 16];
        // SAFETY: as above.
        let rc = unsafe { (self.api().query_gid)(self.raw(), port, c_int::from(index), &mut gid) };
        let kind = match attr.is_ethernet() {
            true => GidKind::Unknown,
            false => GidKind::Infiniband,
        };
        (rc == 0).then_some(GidEntry { index, gid, kind })
    }

    /// The GID to use: the one at `index`, else the one of address `ip`, else the best there is.
    ///
    /// # Errors
    /// [`VerbsError::NoGid`], and as for [`Context::port`].
    pub fn choose_gid(&self, port: u8, index: Option<u8>, ip: Option<IpAddr>) -> Result<GidEntry> {
        let gids = self.gids(port)?;
        let none = |wanted: String| VerbsError::NoGid {
            device: self.name().to_owned(),
            port,
            wanted,
            seen: gids.len(),
        };
        if let Some(index) = index {
            let found = gids.iter().find(|g| g.index == index);
            return found
                .copied()
                .ok_or_else(|| none(format!("GID at index {index}")));
        }
        let of_ip = ip.and_then(|ip| {
            let fits = |g: &&GidEntry| g.kind != GidKind::RoceV1 && g.ip() == Some(ip);
            gids.iter().find(fits)
        });
        of_ip
            .or_else(|| gids.iter().min_by_key(|g| (g.rank(), g.index)))
            .copied()
            .ok_or_else(|| none("GID".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roce_v2_with_an_ipv4_address_is_preferred() {
        let v4 = "10.0.0.7".parse::<std::net::Ipv4Addr>().unwrap();
        let mapped = v4.to_ipv6_mapped().octets();
        let local = "fe80::1".parse::<Ipv6Addr>().unwrap().octets();
        let global = "2001:db8::1".parse::<Ipv6Addr>().unwrap().octets();
        let entry = |kind, gid| GidEntry {
            index: 0,
            gid,
            kind,
        };
        let ranks = [
            entry(GidKind::RoceV2, mapped),
            entry(GidKind::RoceV2, global),
            entry(GidKind::Unknown, mapped),
            entry(GidKind::RoceV2, local),
            entry(GidKind::Infiniband, local),
            entry(GidKind::RoceV1, mapped),
        ]
        .map(|e| e.rank());
        assert_eq!(ranks, [0, 1, 2, 3, 4, 5]);
        assert_eq!(
            entry(GidKind::RoceV2, mapped).ip(),
            Some(IpAddr::V4(v4)),
            "IPv4 addresses come out as such"
        );
        assert_eq!(entry(GidKind::Infiniband, local).ip(), None);
    }
}
