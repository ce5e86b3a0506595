//! Forwarding of the trait [`Device`](crate::Device) to another device.

/// Defines the named methods of `Device` as calls to another device:
/// `forward!(self => self.device; name, len_bytes);`. Methods that are not named are written by
/// hand, or keep their defaults.
macro_rules! forward {
    ($self:ident => $to:expr; $($method:ident),+ $(,)?) => {
        $(forward!(@$method $self $to);)+
    };
    (@name $self:ident $to:expr) => {
        fn name(&$self) -> &str {
            $to.name()
        }
    };
    (@identity $self:ident $to:expr) => {
        fn identity(&$self) -> $crate::DeviceIdentity {
            $to.identity()
        }
    };
    (@len_bytes $self:ident $to:expr) => {
        fn len_bytes(&$self) -> Result<u64, $crate::DeviceError> {
            $to.len_bytes()
        }
    };
    (@alignment_bytes $self:ident $to:expr) => {
        fn alignment_bytes(&$self) -> usize {
            $to.alignment_bytes()
        }
    };
    (@is_writable $self:ident $to:expr) => {
        fn is_writable(&$self) -> bool {
            $to.is_writable()
        }
    };
    (@read_at $self:ident $to:expr) => {
        fn read_at(
            &$self,
            offset_bytes: u64,
            buffer: &mut [u8],
        ) -> Result<usize, $crate::DeviceError> {
            $to.read_at(offset_bytes, buffer)
        }
    };
    (@write_at $self:ident $to:expr) => {
        fn write_at(&$self, offset_bytes: u64, buffer: &[u8]) -> Result<(), $crate::DeviceError> {
            $to.write_at(offset_bytes, buffer)
        }
    };
    (@writes_are_signal_safe $self:ident $to:expr) => {
        fn writes_are_signal_safe(&$self) -> bool {
            $to.writes_are_signal_safe()
        }
    };
    (@sync $self:ident $to:expr) => {
        fn sync(&$self) -> Result<(), $crate::DeviceError> {
            $to.sync()
        }
    };
    (@run $self:ident $to:expr) => {
        fn run(&$self, batch: &mut dyn $crate::Batch, depth: usize) {
            $to.run(batch, depth);
        }
    };
    (@queue_depth $self:ident $to:expr) => {
        fn queue_depth(&$self) -> usize {
            $to.queue_depth()
        }
    };
    (@bytes_in_flight $self:ident $to:expr) => {
        fn bytes_in_flight(&$self) -> u64 {
            $to.bytes_in_flight()
        }
    };
    (@claim_buffers $self:ident $to:expr) => {
        fn claim_buffers(&$self, most_bytes: usize) -> usize {
            $to.claim_buffers(most_bytes)
        }
    };
    (@dax $self:ident $to:expr) => {
        fn dax(&$self) -> Option<(*mut u8, usize)> {
            $to.dax()
        }
    };
    (@page_cache_file $self:ident $to:expr) => {
        fn page_cache_file(&$self) -> Option<std::os::fd::BorrowedFd<'_>> {
            $to.page_cache_file()
        }
    };
    (@counters $self:ident $to:expr) => {
        fn counters(&$self) -> Vec<(&'static str, u64)> {
            $to.counters()
        }
    };
    (@access_path $self:ident $to:expr) => {
        fn access_path(&$self) -> String {
            $to.access_path()
        }
    };
}

pub(crate) use forward;
