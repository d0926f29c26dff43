//! Devices: finding, opening, asking.

use core::ffi::{CStr, c_char, c_int};
use core::ptr::NonNull;
use std::sync::Arc;

use crate::abi::*;
use crate::api::Verbs;
use crate::error::{Result, Step, VerbsError, errno, refused, why_closed};

/// A device that could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName {
    /// `rxe0`, `mlx5_0`, …
    pub name: String,
    /// `uverbs0`, …
    pub node: String,
    /// What kind of adapter: [`node_type`].
    pub node_type: i32,
}

/// An opened device; a cheap handle.
#[derive(Clone)]
pub struct Context(pub(crate) Arc<Opened>);

pub(crate) struct Opened {
    pub(crate) verbs: Verbs,
    pub(crate) raw: NonNull<RawContext>,
    pub(crate) name: String,
    /// Its events are read without waiting.
    pub(crate) unblocked: bool,
}

// SAFETY: libibverbs lets any thread use a context.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the context is open, and what was made from it holds this.
        unsafe { (self.verbs.api().close_device)(self.raw.as_ptr()) };
    }
}

impl core::fmt::Debug for Context {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Context({})", self.0.name)
    }
}

/// What the queue pairs of a device connect by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// InfiniBand's, over whatever carries it: RoCE and EFA too.
    Ib,
    /// iWARP: over TCP.
    Iwarp,
    /// Cisco's.
    Usnic,
}

/// What a device can do.
#[derive(Clone, Debug)]
pub struct DeviceAttr {
    /// Firmware, in the vendor's words.
    pub firmware: String,
    /// PCI vendor.
    pub vendor: u32,
    /// The vendor's number of the part.
    pub part: u32,
    /// Ports.
    pub ports: u8,
    /// Work requests of a queue.
    pub max_work: u32,
    /// Pieces of a work request.
    pub max_sge: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// READs and atomics that a queue pair answers at a time.
    pub reads_answered: u8,
    /// READs and atomics that a queue pair has open at a time.
    pub reads_open: u8,
    /// Atomics of 8 bytes.
    pub atomics: bool,
}

/// What a port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// [`port_state`].
    pub state: u32,
    /// Bytes of the largest path MTU that goes now.
    pub mtu: u16,
    /// Bytes of the longest message.
    pub max_message: u32,
    /// Its LID, on InfiniBand.
    pub lid: u16,
    /// Entries of its GID table.
    pub gids: u32,
    /// [`link_layer`].
    pub link_layer: u8,
}

impl PortAttr {
    /// Its state in a word.
    pub fn state_word(&self) -> &'static str {
        match self.state {
            port_state::DOWN => "down",
            port_state::INIT => "initialising",
            port_state::ARMED => "armed",
            port_state::ACTIVE => "active",
            _ => "in an unknown state",
        }
    }

    /// Is it an Ethernet port (RoCE)?
    pub fn is_ethernet(&self) -> bool {
        self.link_layer == link_layer::ETHERNET
    }
}

/// Bytes of a path MTU code (1 to 5).
pub fn mtu_bytes(code: u32) -> u16 {
    match code {
        1..=5 => 128 << code,
        _ => 0,
    }
}

/// The code of the largest path MTU that is no larger.
pub fn mtu_code(bytes: u16) -> u32 {
    (1..=5).rev().find(|c| mtu_bytes(*c) <= bytes).unwrap_or(1)
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| *c as u8)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Verbs {
    /// The devices that there are.
    ///
    /// # Errors
    /// [`VerbsError::Step`] if the kernel cannot say.
    pub fn devices(&self) -> Result<Vec<DeviceName>> {
        self.each_device(|device| {
            // SAFETY: the list, and the devices in it, live during this call.
            let raw = unsafe { device.as_ref() };
            DeviceName {
                name: text(&raw.name),
                node: text(&raw.dev_name),
                node_type: raw.node_type,
            }
        })
    }

    fn each_device<T>(&self, mut f: impl FnMut(NonNull<RawDevice>) -> T) -> Result<Vec<T>> {
        let mut count: c_int = 0;
        // SAFETY: `count` is written.
        let list = unsafe { (self.api().get_device_list)(&mut count) };
        if list.is_null() {
            return match errno() {
                // Without the modules there are no devices.
                libc::ENOSYS | libc::ENOENT => Ok(Vec::new()),
                e => Err(refused("(all)", Step::Query, "the list of devices", e)),
            };
        }
        // SAFETY: the list has `count` pointers.
        let devices = (0..count.max(0) as usize).map(|i| unsafe { *list.add(i) });
        let found = devices.filter_map(NonNull::new).map(&mut f).collect();
        // SAFETY: it is the list from above; opened devices outlive it.
        unsafe { (self.api().free_device_list)(list) };
        Ok(found)
    }
}

impl Context {
    /// Opens the device of that name.
    ///
    /// # Errors
    /// [`VerbsError::NoDevice`], [`VerbsError::Step`].
    pub fn open(verbs: &Verbs, name: &str) -> Result<Self> {
        let (mut opened, mut node) = (None, String::new());
        let found = verbs.each_device(|device| {
            // SAFETY: the list lives during this call.
            let raw = unsafe { device.as_ref() };
            let own = text(&raw.name);
            if own == name {
                node = format!("/dev/infiniband/{}", text(&raw.dev_name));
                // SAFETY: as above.
                let raw = unsafe { (verbs.api().open_device)(device.as_ptr()) };
                opened = Some(NonNull::new(raw).ok_or_else(errno));
            }
            own
        })?;
        let raw = match opened {
            Some(Ok(raw)) => raw,
            Some(Err(e)) => return Err(refused(name, Step::Open, &node, why_closed(&node, e))),
            None => {
                let name = name.to_owned();
                return Err(VerbsError::NoDevice { name, found });
            }
        };
        Ok(Self(Arc::new(Opened {
            verbs: verbs.clone(),
            raw,
            name: name.to_owned(),
            // SAFETY: opened above.
            unblocked: unsafe { Self::unblock_events(raw, name) },
        })))
    }

    /// The library.
    pub fn verbs(&self) -> &Verbs {
        &self.0.verbs
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn raw(&self) -> *mut RawContext {
        self.0.raw.as_ptr()
    }

    pub(crate) fn api(&self) -> &crate::api::Api {
        self.0.verbs.api()
    }

    pub(crate) fn refused(&self, step: Step, what: &str, errno: i32) -> VerbsError {
        refused(&self.0.name, step, what, errno)
    }

    /// Says so if something of the device could not be taken down. One that is gone has let go of everything.
    pub(crate) fn taken_down(&self, step: &str, rc: c_int) {
        if rc != 0 && rc != libc::EIO && rc != libc::ENODEV {
            tracing::error!(
                "RDMA device {}: {step}: {}",
                self.name(),
                std::io::Error::from_raw_os_error(rc.abs())
            );
        }
    }

    /// What it can do.
    ///
    /// # Errors
    /// [`VerbsError::Step`].
    pub fn attributes(&self) -> Result<DeviceAttr> {
        // SAFETY: all-zero bytes are a valid value of a structure of numbers.
        let mut raw: RawDeviceAttr = unsafe { core::mem::zeroed() };
        // SAFETY: the context is open; the structure is written.
        let rc = unsafe { (self.api().query_device)(self.raw(), &mut raw) };
        if rc != 0 {
            return Err(self.refused(Step::Query, "", rc));
        }
        let count = |n: c_int| n.max(0) as u32;
        let few = |n: c_int| n.clamp(0, 255) as u8;
        Ok(DeviceAttr {
            firmware: text(&raw.fw_ver),
            vendor: raw.vendor_id,
            part: raw.vendor_part_id,
            ports: raw.phys_port_cnt,
            max_work: count(raw.max_qp_wr),
            max_sge: count(raw.max_sge),
            max_cqe: count(raw.max_cqe),
            reads_answered: few(raw.max_qp_rd_atom),
            reads_open: few(raw.max_qp_init_rd_atom),
            atomics: raw.atomic_cap != atomic_cap::NONE,
        })
    }

    /// What a port is, active or not.
    ///
    /// # Errors
    /// [`VerbsError::NoPort`], [`VerbsError::Step`].
    pub fn port(&self, port: u8) -> Result<PortAttr> {
        let ports = self.attributes()?.ports;
        if !(1..=ports).contains(&port) {
            let device = self.name().to_owned();
            return Err(VerbsError::NoPort {
                device,
                port,
                ports,
            });
        }
        let mut raw = RawPortAttr::default();
        // SAFETY: the context is open; the library writes its older, shorter structure.
        let rc = unsafe { (self.api().query_port)(self.raw(), port, &mut raw) };
        if rc != 0 {
            return Err(self.refused(Step::Query, &format!("port {port}"), rc));
        }
        Ok(PortAttr {
            state: raw.state,
            mtu: mtu_bytes(raw.active_mtu),
            max_message: raw.max_msg_sz,
            lid: raw.lid,
            gids: raw.gid_tbl_len.max(0) as u32,
            link_layer: raw.link_layer,
        })
    }

    /// What an active port is.
    ///
    /// # Errors
    /// [`VerbsError::PortDown`], and as for [`Context::port`].
    pub fn active_port(&self, port: u8) -> Result<PortAttr> {
        let attr = self.port(port)?;
        if attr.state != port_state::ACTIVE {
            return Err(VerbsError::PortDown {
                device: self.name().to_owned(),
                port,
                state: attr.state_word(),
            });
        }
        Ok(attr)
    }

    /// What queue pairs connect by.
    pub fn protocol(&self) -> Protocol {
        // SAFETY: an open context's device lives as long as it.
        match unsafe { (*(*self.raw()).device).node_type } {
            node_type::RNIC => Protocol::Iwarp,
            node_type::USNIC | node_type::USNIC_UDP => Protocol::Usnic,
            _ => Protocol::Ib,
        }
    }

    /// Whether its queue pairs can be connected without the library of the device's own protocol.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`].
    pub fn connectable(&self) -> Result<()> {
        let what = match self.protocol() {
            Protocol::Ib => return Ok(()),
            Protocol::Iwarp => {
                "it speaks iWARP, whose connections are made by rdma_cm over TCP, which Doorbell does not do: RoCE, InfiniBand and EFA devices work. An Intel E810 can be switched to RoCE v2 (`devlink dev param show`: enable_roce; or roce_ena=1 of its irdma module); Chelsio and X722 speak iWARP only"
            }
            Protocol::Usnic => "it is a usNIC, which has no reliable queue pairs",
        };
        Err(VerbsError::Unsupported {
            device: self.name().to_owned(),
            what: what.to_owned(),
        })
    }

    /// The table of inline operations.
    pub(crate) fn ops(&self) -> &ContextOps {
        // SAFETY: the context is open; the table does not change after opening.
        unsafe { &(*self.raw()).ops }
    }

    /// The way to make queue pairs whose work requests are built by calls, if library and device have it.
    pub(crate) fn create_qp_ex(&self) -> Option<CreateQpEx> {
        let raw = self.raw();
        // SAFETY: the context is open. All ones in `abi_compat` say that it is the end of an extended one, whose size, just before it,
        // says how far that reaches to the front.
        unsafe {
            if (*raw).abi_compat != usize::MAX {
                return None;
            }
            let extended: *mut ExtendedContext = raw
                .byte_sub(core::mem::offset_of!(ExtendedContext, context))
                .cast();
            if (*extended).size < size_of::<ExtendedContext>() {
                return None;
            }
            (*extended).create_qp_ex
        }
    }

    /// The kernel's name of the device node, for messages.
    pub fn node(&self) -> String {
        // SAFETY: an open context's device lives as long as it.
        unsafe { CStr::from_ptr((*(*self.raw()).device).dev_name.as_ptr()) }
            .to_string_lossy()
            .into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus() {
        let bytes: Vec<u16> = (0..7).map(mtu_bytes).collect();
        assert_eq!(bytes, [0, 256, 512, 1024, 2048, 4096, 0]);
        assert_eq!((mtu_code(4096), mtu_code(1500), mtu_code(9)), (5, 3, 1));
    }
}
