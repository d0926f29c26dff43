//! PCI ids that matter here. Unknown ids are shown as they are, never guessed at.

/// Vendors of GPUs and NICs.
pub(super) fn vendor(id: u64) -> Option<&'static str> {
    Some(match id {
        0x10de => "NVIDIA",
        0x1002 => "AMD",
        0x8086 => "Intel",
        0x15b3 => "NVIDIA (Mellanox)",
        0x1d0f => "Amazon",
        0x14e4 => "Broadcom",
        0x1dd8 => "AMD Pensando",
        0x1425 => "Chelsio",
        0x1414 => "Microsoft",
        0x1ae0 => "Google",
        0x17db => "HPE (Cray)",
        0x434e => "Cornelis",
        0x1af4 => "virtio",
        0x15ad => "VMware",
        _ => return None,
    })
}

/// Adapters by vendor and device.
pub(super) fn nic(vendor: u64, device: u64) -> Option<&'static str> {
    Some(match (vendor, device) {
        (0x15b3, 0x1013) => "ConnectX-4",
        (0x15b3, 0x1015) => "ConnectX-4 Lx",
        (0x15b3, 0x1017) => "ConnectX-5",
        (0x15b3, 0x1019) => "ConnectX-5 Ex",
        (0x15b3, 0x101b) => "ConnectX-6",
        (0x15b3, 0x101d) => "ConnectX-6 Dx",
        (0x15b3, 0x101e) => "ConnectX virtual function",
        (0x15b3, 0x101f) => "ConnectX-6 Lx",
        (0x15b3, 0x1021) => "ConnectX-7",
        (0x15b3, 0x1023) => "ConnectX-8",
        (0x15b3, 0xa2d6) => "BlueField-2",
        (0x15b3, 0xa2dc) => "BlueField-3",
        (0x1d0f, 0xefa0) => "EFA",
        (0x1d0f, 0xefa1) => "EFA (2nd generation)",
        (0x1d0f, 0xefa2) => "EFA (3rd generation)",
        (0x1d0f, 0xefa3) => "EFA (4th generation)",
        (0x1d0f, 0xec20 | 0xec21) => "ENA",
        (0x1af4, 0x0001 | 0x1000 | 0x1041) => "network device",
        (0x14e4, 0x1750) => "BCM57508 (Thor)",
        (0x14e4, 0x1760) => "BCM57608 (Thor 2)",
        _ => return None,
    })
}

/// Architecture and lowest compute capability (times ten) of an NVIDIA GPU, by ranges of device ids.
pub(super) fn nvidia(device: u64) -> Option<(&'static str, u32)> {
    Some(match device {
        0x0fc0..=0x12ff => ("Kepler or Maxwell", 30),
        0x1300..=0x17ff => ("Maxwell or Pascal", 50),
        0x1b00..=0x1d7f => ("Pascal", 61),
        0x1d80..=0x1dff => ("Volta", 70),
        0x1e00..=0x1fff | 0x2180..=0x21ff => ("Turing", 75),
        0x2080..=0x20ff => ("Ampere", 80),
        0x2200..=0x22ff | 0x2400..=0x25ff => ("Ampere", 86),
        0x2300..=0x23ff => ("Hopper", 90),
        0x2600..=0x28ff => ("Ada", 89),
        0x2900..=0x29ff | 0x3180..=0x31ff => ("Blackwell", 100),
        0x2b00..=0x2fff => ("Blackwell", 120),
        _ => return None,
    })
}
